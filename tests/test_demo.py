"""The demo learns, and logs it as a user would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runmirror.demo import DemoConfig, Learner, next_log_path, run_demo, train
from runmirror.exceptions import MissingPackageError

SMALL = DemoConfig(iterations=25, questions=48, hidden=48, learning_rate=8e-3, kl_coef=0.05)


def rows(log_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def numbers(log_path: Path) -> list[dict[str, Any]]:
    """The rows without their times."""
    return [{key: row[key] for key in row if key[:5] != "time/" and key != "_timestamp"} for row in rows(log_path)]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("demo") / "run", SMALL)


def test_it_learns(log_path: Path) -> None:
    """A much higher reward, and a lower entropy, at the end than at the start."""
    found = rows(log_path)[:-1]
    mean = {key: [np.mean([row[key] for row in part]) for part in (found[:5], found[-5:])] for key in found[1]}
    first, last = mean["env/all/reward/total"]
    assert last > first + 0.4
    first, last = mean["entropy"]
    assert last < 0.5 * first
    assert mean["env/all/format_parse"][1] > 0.9
    assert mean["ac_tokens_per_turn"][1] == pytest.approx(4, abs=0.2)


def test_numbers_make_sense(log_path: Path) -> None:
    """Each within its range: shares in 0..1, divergences not negative, the sampler close to the learner."""
    for row in rows(log_path)[:-1]:
        for key in ("env/all/reward/total", "env/all/correct", "env/all/format_parse", "policy/clipfrac_avg"):
            assert 0 <= row[key] <= 1
        assert row["env/all/correct"] <= row["env/all/format_parse"]
        assert 0 < row["kl_sample_train_v2"] < 0.01
        assert abs(row["kl_sample_train_v1"]) < 0.01
        assert row["kl_policy_base"] > 0
        assert SMALL.learning_rate / 2 <= row["optim/lr"] <= SMALL.learning_rate
        assert row["time/sample"] + row["time/train"] <= row["time/total"]


def test_log(log_path: Path) -> None:
    """A row per iteration with its progress, an evaluation every ten, final numbers without a step, and the config."""
    found = rows(log_path)
    assert [row.get("step") for row in found] == [*range(25), None]
    assert [row["step"] for row in found[:-1] if "test/env/all/reward/total" in row] == [0, 10, 20]
    assert found[24]["progress/done_frac"] == 1
    assert found[-1]["test/env/all/correct"] > 0.1
    assert json.loads((log_path / "config.json").read_text())["hidden"] == 48
    assert not any("_rejected" in row or "_nonfinite" in row for row in found)


def test_checkpoints(log_path: Path) -> None:
    """Files in the log_path that hold the learner's state, named by the lines of checkpoints.jsonl."""
    lines = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [(line["name"], line["batch"], line.get("final")) for line in lines] == [
        ("000020", 20, None),
        ("final", 25, True),
    ]
    learner = Learner(SMALL)
    for line in lines:
        with np.load(log_path / line["state_path"]) as state:
            assert set(state) >= set(learner.weights)
    with np.load(log_path / "checkpoints" / "final.npz") as state:
        learner.weights = {name: state[name] for name in learner.weights}
    assert learner.evaluate() == {key: rows(log_path)[-1][key] for key in learner.evaluate()}


@pytest.mark.slow
def test_deterministic(log_path: Path, tmp_path: Path) -> None:
    """The same numbers for the same seed, others for another."""
    short = DemoConfig(iterations=3, questions=8, hidden=16)
    first = numbers(train(tmp_path / "a", short))
    assert numbers(train(tmp_path / "b", short)) == first
    assert numbers(train(tmp_path / "c", DemoConfig(iterations=3, questions=8, hidden=16, seed=1))) != first


def test_gradient(tmp_path: Path) -> None:
    """The slope of the loss, by finite differences, for every kind of weight."""
    learner = Learner(DemoConfig(questions=4, answers_per_question=4, hidden=8, kl_coef=0.3))
    learner.weights = {name: weight.astype(np.float64) for name, weight in learner.weights.items()}
    learner.reference = {name: weight + 0.1 for name, weight in learner.weights.items()}
    random = np.random.default_rng(1)
    count = 40
    question, place = random.integers(0, 100, count), random.integers(0, 6, count)
    token, advantage = random.integers(0, 14, count), random.normal(size=count)
    every = np.arange(count)
    _, _, start = learner.forward(learner.weights, question, place)
    old = start[every, token] + random.normal(0, 0.3, count)  # some beyond the clip range

    def loss(weights: dict[str, Any]) -> float:
        _, _, logprobs = learner.forward(weights, question, place)
        _, _, reference = learner.forward(learner.reference, question, place)
        ratio = np.exp(logprobs[every, token] - old)
        policy = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        divergence = (np.exp(logprobs) * (logprobs - reference)).sum(axis=1)
        return float((policy + 0.3 * divergence).mean())

    before = dict(learner.weights)
    seen: dict[str, Any] = {}
    learner.adam = seen.update  # type: ignore[method-assign]
    learner.step(question, place, token, old, advantage)
    for name, weight in before.items():
        where = np.unravel_index(np.abs(seen[name]).argmax(), weight.shape)
        moved = weight.copy()
        moved[where] += 1e-6
        slope = (loss(before | {name: moved}) - loss(before)) / 1e-6
        assert slope == pytest.approx(seen[name][where], rel=1e-3)


@pytest.mark.slow
def test_run_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs 1, 2, ... below the folder; a line for each iteration is handed over and nothing is printed."""
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    assert run_demo(iterations=1) == Path("runmirror-demo/1")
    assert run_demo(iterations=2, on_iteration=lines.append) == Path("runmirror-demo/2")
    assert [line.split("  ")[0] for line in lines] == ["iteration 1/2", "iteration 2/2"]
    assert "reward 0." in lines[0]
    assert len(rows(Path("runmirror-demo/2"))) == 3
    assert capsys.readouterr() == ("", "")


def test_next_log_path(tmp_path: Path) -> None:
    """The number behind the highest, whatever else is in the folder, and 1 in a new one."""
    assert next_log_path(tmp_path / "new") == tmp_path / "new" / "1"
    for name in ("2", "9", "tensorboard", "11.old"):
        (tmp_path / name).mkdir()
    assert next_log_path(tmp_path) == tmp_path / "10"


def test_without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the extra, and no log begun."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(MissingPackageError, match=r"runmirror\[tensorboard\]"):
        train(tmp_path / "x")
    assert not (tmp_path / "x").exists()
