"""Keys, values, steps, times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

from runmirror.sinks.base import RefusesKeys
from runmirror.testing.conformance.base import BEGAN, DEADLINE, Harness, a_row, a_run, rows

KEYS: tuple[str, ...] = (
    "a",
    "a/b",
    "a/b/c",
    "env/all/reward/total",
    "time/sample:mean",
    "with space",
    "naïve/ключ/鍵",
    "🙂",
    "100%",
    "x.y-z_1",
)
KEYS += (
    "'quoted' \"twice\"",
    "back\\slash",
    "tab\tin",
    "a=b,c;d",
    "../up",
    "/rooted",
    "ends/",
    "<b>&amp;",
    "k" * 300,
    "UPPER",
    "upper",
)


class ValueTests(Harness):
    """Keys, values, steps, times."""

    def test_any_key_arrives_or_is_refused_by_name(self, tmp_path: Path) -> None:
        """Unicode, slashes, spaces, 300 characters, ``a`` beside ``a/b``: each is shown, or named in Rejected."""
        every = [a_row(step, {key: float(step * 100 + n) for n, key in enumerate(KEYS)}) for step in range(3)]
        sink = self.make_sink(tmp_path)
        sink.open(a_run(), None)
        refused = {(one.ordinal, one.key) for one in sink.put(every)}
        assert sink.flush(DEADLINE) == 3
        sink.close(None, DEADLINE)
        assert all(key in KEYS for _, key in refused)
        if isinstance(sink, RefusesKeys):
            assert {key for key in KEYS if sink.refuses(key)} == {key for _, key in refused}
        for one in every:
            one.data = {key: value for key, value in one.data.items() if (one.ordinal, key) not in refused}
        self.holds(sink, [replace(one) for one in every])

    def test_nonfinite_values_are_kept_as_stated(self, tmp_path: Path) -> None:
        """NaN and infinities arrive as ``capabilities.nonfinite`` says; the rest of their rows arrives always."""
        sink = self.make_sink(tmp_path)
        kept = sink.capabilities.nonfinite
        odd = {"nan": math.nan, "inf": math.inf, "minus": -math.inf}
        self.deliver(tmp_path, [a_row(step, odd | {"fine": step + 0.5}) for step in range(2)])
        shown = {(point.key, point.step): point.value for point in self.read(sink, a_run())}
        for step in range(2):
            assert shown["fine", step] == step + 0.5
            for key, value in odd.items():
                if kept == "all" or (kept == "nan" and key == "nan"):
                    found = shown[key, step]
                    assert found == value or (math.isnan(found) and math.isnan(value)), key

    def test_extreme_values_keep_the_stated_precision(self, tmp_path: Path) -> None:
        """Huge and tiny numbers, negative zero, bools, integers up to 64 bits and beyond."""
        values = [0, -0.0, True, -1, 0.1, 1 / 3, 1e-30, 1e30, 2**24 + 1, 2**53 + 1, 2**63 - 1, -(2**63), 10**30]
        if self.make_sink(tmp_path).capabilities.precision == "float64":
            values += [1e300, -1e300, 5e-324, 10**300]
        every = [a_row(0, {f"v{n}": value for n, value in enumerate(values)})]
        self.holds(self.deliver(tmp_path, every), every)

    def test_any_step_is_shown_as_it_is(self, tmp_path: Path) -> None:
        """Negative, zero, huge, with gaps; the ordinal never takes its place."""
        every = [replace(a_row(n, {"loss": n + 0.5}), step=step) for n, step in enumerate((-5, 0, 7, 1000, 2**40))]
        self.holds(self.deliver(tmp_path, every), every)

    def test_late_rows_of_other_keys_keep_their_steps(self, tmp_path: Path) -> None:
        """Evaluations that arrive late, with an old step, beside newer training rows."""
        order = [("loss", 0), ("loss", 1), ("eval", 0), ("loss", 2), ("loss", 3), ("eval", 2), ("loss", 4)]
        every = [replace(a_row(n, {key: n + 0.25}), step=step) for n, (key, step) in enumerate(order)]
        self.holds(self.deliver(tmp_path, every), every)

    def test_the_last_write_of_a_step_is_shown(self, tmp_path: Path) -> None:
        """A key logged twice at one step: the last value is there, and none that was never logged."""
        every = [replace(a_row(n, {"loss": float(n)}), step=step) for n, step in enumerate((0, 1, 1, 1, 2))]
        shown = Counter((point.step, point.value) for point in self.read(self.deliver(tmp_path, every), a_run()))
        assert shown.keys() >= {(0, 0.0), (1, 3.0), (2, 4.0)}
        assert shown <= Counter((one.step, one.data["loss"]) for one in every)

    def test_a_rewind_is_followed(self, tmp_path: Path) -> None:
        """After a resume from step 2 the new points are there; a "native" sink shows no superseded one."""
        before = [a_row(n, {"loss": float(n), "only": n + 0.5}) for n in range(5)]
        after = [replace(a_row(n, {"loss": 10.0 + n, "only": float(n)}), step=n - 3) for n in range(5, 9)]
        after[0].rewind = 2
        sink = self.deliver(tmp_path, before + after)
        surviving = before[:2] + after
        if sink.capabilities.rewinds == "native":
            self.holds(sink, surviving)
        else:
            self.holds(sink, surviving, among=before + after)

    def test_final_numbers_are_shown(self, tmp_path: Path) -> None:
        """A row without a step of its own arrives with its values."""
        every = [*rows(3), replace(a_row(3, {"final/score": 0.75}), step=2, summary=True)]
        sink = self.deliver(tmp_path, every)
        assert ("final/score", 0.75) in {(point.key, point.value) for point in self.read(sink, a_run())}

    def test_text_is_no_harm(self, tmp_path: Path) -> None:
        """Rows with text, nothing but text, lists and nested values: their numbers arrive, the text is no point."""
        extra = {"note": "a\nsample", "html": "<script>", "none": None, "list": [1, 2], "deep": {"a": 1}, "empty": ""}
        every = [a_row(n, extra | ({"loss": n + 0.5} if n % 2 else {})) for n in range(5)]
        self.holds(self.deliver(tmp_path, every), every)

    def test_times_are_those_of_the_rows(self, tmp_path: Path) -> None:
        """Within ``capabilities.time_precision``: old runs stay old."""
        every = [replace(one, time=BEGAN - 86400.0 * 365 + one.ordinal * 3600.125) for one in rows(4)]
        times = {one.step: one.time for one in every}
        sink = self.deliver(tmp_path, every)
        for point in self.read(sink, a_run()):
            assert abs(point.time - times[point.step]) <= sink.capabilities.time_precision + 1e-6
