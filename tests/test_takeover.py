"""Another machine goes on with a run whose last rows were mirrored, but never uploaded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import runmirror
from runmirror.find import find_runs, open_run
from runmirror.log.index import ANY, LineIndex
from runmirror.log.rows import START
from runmirror.state import MirrorState
from runmirror.storage import LocalStorage
from runmirror.testing.dummy import read_dummy
from tests.cloud import URI, Trainer, options, reading, rows_of, until
from tests.servers.gcs import GcsServer, gcs_server

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


CODE = """
for n in range(10): run.log_metrics({'life': LIFE, 'n': n})
run.storage.flush()
go()
run.storage._uploader._interval = 600
for n in range(10, 15): run.log_metrics({'life': LIFE, 'n': n})
go()
"""


def values(place: Path) -> list[tuple[float, float]]:
    return [(points["life"], points["n"]) for *_, points in read_dummy(place)["run"].rows if points]


@pytest.mark.slow
def test_rows_that_never_reached_the_log_hide_no_others(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three machines, two of them killed with rows that only the tracker has. Each row of the log is in the tracker once, what
    was orphaned stays beside it, ``verify`` counts that, and all machines number the rows alike."""
    place = tmp_path / "tracker"
    given = {"report_to": {"dummy": {"folder": str(place)}}, "storage_options": options(server, interval=0.2)}
    for life in range(2):
        with Trainer(server, tmp_path / f"home-{life}", CODE.replace("LIFE", str(life)), **given) as trainer:
            trainer.line()
            until(lambda life=life: (life, 9) in (values(place) if place.exists() else []))  # type: ignore[misc]
            until(lambda life=life: len(rows_of(server)) == 10 * (life + 1))  # type: ignore[misc]
            server.faults.down = True  # what comes now is never uploaded
            trainer.say()
            trainer.line()
            until(lambda life=life: (life, 14) in values(place))  # type: ignore[misc]
            trainer.kill()
            kill_mirrors(tmp_path / f"home-{life}")
        server.faults.down = False
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "home-2"))
    with runmirror.start(URI, code=False, **given) as run:
        for n in range(10):
            run.log_metrics({"life": 2, "n": n})
    assert run.status().sinks["dummy"].state == "delivered"
    log = [(row["life"], row["n"]) for row in rows_of(server)]
    assert log == [(life, n) for life in range(3) for n in range(10)]
    held = values(place)
    assert len(held) == len(set(held))
    assert set(held) - set(log) == {(life, n) for life in range(2) for n in range(10, 15)}
    assert set(log) <= set(held)
    numbers = []
    for home in ("home-2", "home-0", "elsewhere"):
        monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / home))
        again = runmirror.import_runs([URI], "dummy", given["report_to"]["dummy"], rewinds="all", read=reading(server))
        assert again.as_dict()["totals"]["rows"] == 0, again
        result = runmirror.verify([URI], "dummy", given["report_to"]["dummy"], rewinds="all", read=reading(server))
        assert result.ok, result.runs
        assert result.totals()["matching"] == 2 * len(log)
        assert result.totals()["known"]["orphaned"] == 2 * 10
        source, _ = open_run(find_runs([URI], storage_options=server.options)[0], reading(server))
        numbers.append([row.ordinal for row in source.rows(START) if not row.fault])
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(set(numbers[0])) == len(log)


def kill_mirrors(home: Path) -> None:
    """SIGKILL of the processes that mirror on this machine: it is gone as a whole."""
    import signal

    for entry in Path("/proc").iterdir() if Path("/proc").exists() else ():
        if entry.name.isdigit():
            try:
                is_child = b"runmirror.child" in (entry / "cmdline").read_bytes()
                if is_child and f"RUNMIRROR_HOME={home}\0".encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue


@pytest.mark.slow
def test_a_mirror_elsewhere_that_is_behind_the_writers(
    server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the tracker holds more than is uploaded an import elsewhere says so, and nothing is taken for orphaned."""
    place = tmp_path / "tracker"
    given = {"report_to": {"dummy": {"folder": str(place)}}, "storage_options": options(server, interval=0.2)}
    with Trainer(server, tmp_path / "there", CODE.replace("LIFE", "0") + "run.finish()\n", **given) as trainer:
        trainer.line()
        trainer.say()
        trainer.line()
        until(lambda: place.exists() and (0, 14) in values(place))
        assert len(rows_of(server)) == 10
        to = given["report_to"]["dummy"]
        again = runmirror.import_runs([URI], "dummy", to, rewinds="all", read=reading(server), patience=0)
        assert again.count("behind") == 1
        assert "only 10 are uploaded yet" in str(again.runs[0].error) or "mirrors this run" in str(again.runs[0].error)
        trainer.say()
        assert trainer.end()[0] == 0
    again = runmirror.import_runs([URI], "dummy", to, rewinds="all", read=reading(server))
    assert again.ok, again
    assert values(place) == [(0, n) for n in range(15)]


def test_an_index_that_was_adopted_numbers_alike(tmp_path: Path) -> None:
    """Lines keep the ordinals of the other machine whatever they are, also after loading it again; new ones follow."""
    first = LineIndex(tmp_path / "one")
    first.extend(0, [(bytes([n]) * 8, float("nan")) for n in range(3)])
    first.skip(2, 7)
    assert [first.ordinal(line) for line in range(4)] == [0, 1, 7, 8]
    other = LineIndex(tmp_path / "two")
    other.adopt(first.starts)
    for index in (other, LineIndex(tmp_path / "two")):
        assert [index.ordinal(line) for line in range(4)] == [0, 1, 7, 8]
        assert index.record(1) is not None
        assert index.record(1)[0] == ANY  # type: ignore[index]
        assert len(index) == 7
    assert not other.extend(7, [(b"x" * 8, float("nan"))])
    assert len(LineIndex(tmp_path / "two")) == 8


def test_rows_wait_for_the_first_copy_of_the_state(tmp_path: Path) -> None:
    """A machine that is gone right after its first rows were mirrored has left word of it, however slow the store was."""

    class Slow(LocalStorage):
        def write(self, path: str, data: bytes) -> None:
            time.sleep(0.3)
            super().write(path, data)

    log = Slow(tmp_path / "log")
    state = MirrorState(tmp_path / "state", "dummy", "run", "place", "all", copy_in=log)
    state.save(copy=True)
    assert log.read(f".runmirror/mirror/{state.path.name}") == state.path.read_bytes()
    state.close()
