"""The rules of health on random runs: each fault is found at once, and nothing else is."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runmirror.catalogue.entries import shipped
from runmirror.catalogue.findings import Finding
from runmirror.catalogue.health import Health
from runmirror.log.rows import Row
from tests.catalogue.synthetic import FAMILIES, FAULTS, Data, as_rows, healthy


def findings(rows: list[Row]) -> list[Finding]:
    health = Health(shipped())
    for row in rows:
        health.feed(row)
    return list(health.findings)


def marks(rows: list[Data]) -> list[tuple[str, str | None, int | None]]:
    return [(one.rule, one.key, one.step) for one in findings(as_rows(rows))]


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_runs_give_no_finding(family: str) -> None:
    """None in 200 random runs of each framework."""
    for seed in range(200):
        found = findings(as_rows(healthy(Random(f"{family} {seed}"), family)))
        assert found == [], f"seed {seed}: {', '.join(map(str, found))}"


CASES = [(name, family) for name, fault in FAULTS.items() for family in fault.families]


@pytest.mark.parametrize(("name", "family"), CASES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_fault_is_found_within_three_rows_and_alone(name: str, family: str, seed: int) -> None:
    """One finding, of the fault's rule, at its key and step, when three rows at most have it."""
    random = Random(seed)
    rows = healthy(random, family)
    places = [n for n in range(30, len(rows) - 5) if len(rows[n]) > 6 and len(rows[n - 1]) > 6]  # training rows
    at = random.choice(places)
    step = rows[at]["step"]
    fault = FAULTS[name]
    key = fault.put(rows, at, family, random)
    health = Health(shipped())
    training = 0
    for row in as_rows(rows):
        health.feed(row)
        training += row.ordinal >= at and (len(row.data) > 6 or bool(row.fault))
        if training == 3:
            break
    found = [(one.rule, one.key) for one in health.findings]
    assert found == [(fault.rule, key)]
    if name == "broken":
        assert next(iter(health.findings)).row == at
    else:
        assert next(iter(health.findings)).step == step
    for late in as_rows(rows)[row.ordinal + 1 :]:
        health.feed(late)
    assert {(one.rule, one.key) for one in health.findings} == {(fault.rule, key)}
