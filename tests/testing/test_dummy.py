"""The dummy tracker: its faults, and what imports make of them, in this process and in others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runmirror.exceptions import OptionError, Retry
from runmirror.importer import import_runs
from runmirror.sinks.registry import load_sink, make_sink
from runmirror.testing import DummyOptions, DummySink
from runmirror.testing.conformance import a_file, a_row, a_run, rows
from runmirror.testing.dummy import CRASHED, DummyRun, read_dummy, read_dummy_run
from tests.logs import flat_log, train_row, write_rows


def dummy(folder: Path, **options: Any) -> DummySink:
    return DummySink(DummyOptions(folder=str(folder), **options))


def held(folder: Path) -> DummyRun:
    (path,) = folder.glob("*.jsonl")
    return read_dummy_run(path)


def rehearse(tmp_path: Path, **options: Any) -> Any:
    """Import the run in ``tmp_path/runs`` to a dummy with these faults that asks for no pauses."""
    faults = {"folder": str(tmp_path / "dummy"), "retry_after": 0.001} | options
    return import_runs([tmp_path / "runs"], "dummy", faults, patience=20)


def test_without_faults_everything_is_in_the_file(tmp_path: Path) -> None:
    """12 rows with their values, 3 files once, the status once, after two imports."""
    flat_log(tmp_path / "runs" / "a")
    assert rehearse(tmp_path).ok
    assert rehearse(tmp_path).ok
    run = read_dummy(tmp_path / "dummy")["a"]
    assert [ordinal for ordinal, *_ in run.rows] == list(range(12))
    assert run.rows[3][3]["env/all/reward/total"] == pytest.approx(0.3)
    assert [path for path, _ in run.files] == ["checkpoints.jsonl", "code.diff", "config.json"]
    assert run.statuses == ["finished"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{"transient": 0.3}, {"late": 0.3}, {"transient": 0.2, "late": 0.3}])
def test_an_outage_costs_nothing(tmp_path: Path, options: dict[str, float], seed: int) -> None:
    """300 rows once each, through failures and lost answers of any call, without a row put aside."""
    write_rows(tmp_path / "runs" / "a" / "metrics.jsonl", (train_row(step) for step in range(300)))
    summary = rehearse(tmp_path, seed=seed, **options)
    assert (summary.ok, summary.runs[0].rejected) == (True, 0)
    run = held(tmp_path / "dummy")
    assert [step for _, step, _, _ in run.rows] == list(range(300))
    assert all(points for *_, points in run.rows)


def test_faults_happen_as_often_as_asked(tmp_path: Path) -> None:
    """About 300 of 1,000 calls fail with transient=0.3, none without, all with 1; the same ones for the same seed."""

    def failures(**options: Any) -> list[int]:
        sink = dummy(tmp_path / str(options), **options)
        sink.open(a_run(), None)
        failed = []
        for number in range(1000):
            try:
                sink.put([])
            except Retry:
                failed.append(number)
        sink.close(None, 1)
        return failed

    some = failures(transient=0.3, calls="put", seed=7)
    assert 240 < len(some) < 360
    assert some == failures(transient=0.3, calls="put", seed=7, retry_after=1)
    assert some != failures(transient=0.3, calls="put", seed=8)
    assert (failures(), len(failures(transient=1, calls="put"))) == ([], 1000)


@pytest.mark.parametrize(("plain", "kind"), [(False, Retry), (True, ConnectionError)])
def test_a_failure_is_explained_or_not(tmp_path: Path, plain: bool, kind: type[Exception]) -> None:
    """Retry with the pause it asks for, or a plain ConnectionError."""
    sink = dummy(tmp_path, transient=1, plain=plain, retry_after=7)
    with pytest.raises(kind, match="open failed") as caught:
        sink.open(a_run(), None)
    assert getattr(caught.value, "after", 7) == 7


def test_late_success_applies_first(tmp_path: Path) -> None:
    """The rows are in the file although put failed; they are passed over when they come again."""
    sink = dummy(tmp_path, late=1, calls="put")
    sink.open(a_run(), None)
    for _ in range(2):
        with pytest.raises(Retry, match="answer to put was lost"):
            sink.put(rows(3))
    assert sink.flush(1) == 3
    sink.close(None, 1)
    assert len(held(tmp_path).rows) == 3


def test_refused_rows_and_keys_are_refused_for_good(tmp_path: Path) -> None:
    """The same rows and keys in any try, named in Rejected, and counted by an import that still ends."""
    every = [a_row(n, {f"key{k}": float(k) for k in range(20)}) for n in range(100)]
    told = []
    for folder in ("one", "two"):
        sink = dummy(tmp_path / folder, reject_row=0.1, reject_key=0.2, seed=3)
        sink.open(a_run(), None)
        told.append([(one.ordinal, one.key) for one in sink.put(every[:50]) + sink.put(every[50:])])
        sink.close(None, 1)
    assert told[0] == told[1]
    refused_rows = {ordinal for ordinal, key in told[0] if key is None}
    refused_keys = {key for _, key in told[0] if key is not None}
    assert 2 < len(refused_rows) < 25
    assert 0 < len(refused_keys) < 12
    for ordinal, _, _, points in held(tmp_path / "one").rows:
        expected = set() if ordinal in refused_rows else {f"key{k}" for k in range(20)} - refused_keys
        assert points.keys() == expected
    flat_log(tmp_path / "runs" / "a")
    summary = rehearse(tmp_path, reject_row=0.5)
    assert (summary.ok, summary.runs[0].state, len(held(tmp_path / "dummy").rows)) == (False, "complete", 12)
    assert 0 < summary.runs[0].rejected < 12


def test_a_hang_lasts_as_long_as_asked(tmp_path: Path) -> None:
    """At least 0.1 s for hang_seconds=0.1, then it works."""
    sink = dummy(tmp_path, hang=1, hang_seconds=0.1, calls="put")
    sink.open(a_run(), None)
    began = time.monotonic()
    sink.put(rows(1))
    assert time.monotonic() - began >= 0.1
    assert sink.flush(1) == 1


def test_only_the_calls_named_fail(tmp_path: Path) -> None:
    """With calls=close everything else works, and close fails but lets go."""
    sink = dummy(tmp_path, transient=1, calls="close")
    sink.open(a_run(), None)
    sink.put(rows(1))
    sink.put_file(a_file("config.json", "config", b"{}"))
    assert sink.flush(1) == 1
    with pytest.raises(Retry, match="close failed"):
        sink.close(a_run(), 1)
    with pytest.raises(RuntimeError, match="open comes first"):
        sink.put(rows(1))


@pytest.mark.slow
def test_a_crash_ends_the_process_and_costs_nothing(tmp_path: Path) -> None:
    """Exit code 70 three times from a real import, which then gets through; every row is there once."""
    write_rows(tmp_path / "runs" / "a" / "metrics.jsonl", (train_row(step) for step in range(40)))
    command = [sys.executable, "-m", "runmirror", "import", "runs", "--to", "dummy", "--json", "-o", "crash=0.5"]
    command += ["-o", "seed=3", "-o", "late=0.2", "-o", "retry_after=0.001"]
    command += ["--identity", "content"]  # the faults depend on the run's id, which must not depend on the folder
    codes = []
    while not codes or codes[-1]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        codes.append(done.returncode)
        assert done.returncode in (0, CRASHED), done.stderr
        assert len(codes) < 60
    assert codes == [CRASHED, CRASHED, CRASHED, 0]
    assert [step for _, step, _, _ in held(tmp_path / "runmirror-dummy").rows] == list(range(40))
    assert json.loads(done.stdout)["ok"] is True


def test_a_torn_line_is_taken_away(tmp_path: Path) -> None:
    """Cut anywhere in its last row, the file holds the rows before, and gets the row again."""
    sink = dummy(tmp_path)
    sink.open(a_run(), None)
    sink.put(rows(3))
    sink.close(None, 1)
    (path,) = tmp_path.glob("*.jsonl")
    whole = path.read_bytes()
    second = whole[:-1].rindex(b"\n") + 1
    for cut in range(second + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert sink.open(a_run(), None).position == 2
        sink.put(rows(3)[2:])
        sink.close(None, 1)
        assert len(held(tmp_path).rows) == 3


def test_a_gap_is_an_error(tmp_path: Path) -> None:
    """A row above the next one is refused loudly: the mirror broke its promise."""
    sink = dummy(tmp_path)
    sink.open(a_run(), None)
    with pytest.raises(ValueError, match="row 1 came where 0 was due"):
        sink.put(rows(2)[1:])


@pytest.mark.parametrize(
    ("option", "value"), [("transient", 1.5), ("hang", -0.1), ("calls", "put,dance"), ("seed", "x")]
)
def test_impossible_options_are_refused(option: str, value: object) -> None:
    """OptionError that names the option."""
    with pytest.raises(OptionError, match=option):
        make_sink("dummy", {option: value})


def test_is_for_tests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of report_to="all"; its folder comes from RUNMIRROR_DUMMY_FOLDER."""
    assert load_sink("dummy").capabilities.test_only
    monkeypatch.setenv("RUNMIRROR_DUMMY_FOLDER", "/env")
    assert make_sink("dummy").destination() == "dummy:///env"


def test_any_run_id_is_a_file_in_the_folder(tmp_path: Path) -> None:
    """Ids with slashes, dots or nothing stay inside; different ids are different files."""
    make: Callable[[str], str] = lambda run_id: dummy(tmp_path).open(a_run(run_id), None).url  # noqa: E731
    urls = {make(run_id) for run_id in ("../up", "/root", "", "ü", "a" * 300, "a", "a.b")}
    assert len(urls) == 7
    assert {Path(url).parent for url in urls} == {tmp_path}
