"""The line index: which ordinal each line has, for ever."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from runmirror.log.index import NO_TIME, LineIndex, MovedError, line_digest


def entries(*lines: str, time: float = NO_TIME) -> list[tuple[bytes, float]]:
    return [(line_digest(line.encode()), time) for line in lines]


def test_lines_are_numbered_from_zero() -> None:
    """Line n has ordinal n while a log only grows; a line that is not there yet has no record."""
    index = LineIndex()
    index.extend(0, entries("a", "b"))
    assert [index.ordinal(line) for line in range(4)] == [0, 1, 2, 3]
    assert len(index) == 2
    record = index.record(1)
    assert record is not None
    assert record[0] == line_digest(b"b")
    assert math.isnan(record[1])
    assert index.record(2) is None


def test_a_cut_continues_above_the_highest_ordinal() -> None:
    """Lines before the cut keep 0 and 1, the next ones get 5 and 6; a deeper cut replaces the first."""
    index = LineIndex()
    index.extend(0, entries("a", "b", "c", "d", "e"))
    assert index.cut(2) == 5
    index.extend(5, entries("C", "D"))
    assert [index.ordinal(line) for line in range(4)] == [0, 1, 5, 6]
    assert index.cut(1) == 7
    assert [index.ordinal(line) for line in range(3)] == [0, 7, 8]
    assert index.cut(0) == 7
    assert index.starts == [(0, 7)]


def test_a_reopened_index_is_the_same(tmp_path: Path) -> None:
    """The same ordinals, digests and times, from two files that a kill can't tear."""
    index = LineIndex(tmp_path / "new")
    index.extend(0, entries("a", "b", "c", time=5.5))
    index.cut(1)
    index.extend(3, entries("B"))
    again = LineIndex(tmp_path / "new")
    assert again.starts == index.starts == [(0, 0), (1, 3)]
    assert [again.record(n) for n in range(3)] == entries("a", "b", "c", time=5.5)
    assert len(again) == 4


def test_nothing_to_add_writes_nothing(tmp_path: Path) -> None:
    """No folder is made for an empty log."""
    assert LineIndex(tmp_path / "none").extend(0, []) is False
    assert not (tmp_path / "none").exists()


def test_half_a_record_is_left_out_and_overwritten(tmp_path: Path) -> None:
    """A writer killed in mid-record: two whole records, and the third is written where the half one lay."""
    LineIndex(tmp_path).extend(0, entries("a", "b"))
    with open(tmp_path / "lines.bin", "ab") as file:
        file.write(b"torn---")
    index = LineIndex(tmp_path)
    assert len(index) == 2
    index.extend(2, entries("c"))
    assert (tmp_path / "lines.bin").stat().st_size == 48
    assert LineIndex(tmp_path).record(2) is not None


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"7", b'{"a": 1}', b'[["x", 1]]', b"[[0]]", b"[[3, 0]]", b"[[0, 0], [4, 9], [2, 12]]", b"\xff"],
)
def test_a_damaged_list_of_stretches_is_never_fatal(tmp_path: Path, damage: bytes) -> None:
    """One stretch from the first line on, and a cut still goes above every ordinal that was used."""
    LineIndex(tmp_path).extend(0, entries("a", "b", "c"))
    (tmp_path / "lines.json").write_bytes(damage)
    index = LineIndex(tmp_path)
    assert index.starts == [(0, 0)]
    assert index.cut(1) == 3
    assert json.loads((tmp_path / "lines.json").read_bytes()) == [[0, 0], [1, 3]]


def test_lost_records_do_not_free_their_ordinals(tmp_path: Path) -> None:
    """A lines.bin that lost its end under a stretch from 4 on: new entries lie at 4, as the stretch says."""
    index = LineIndex(tmp_path)
    index.extend(0, entries("a", "b", "c", "d"))
    index.cut(1)
    index.extend(4, entries("B"))
    (tmp_path / "lines.bin").write_bytes((tmp_path / "lines.bin").read_bytes()[:32])
    again = LineIndex(tmp_path)
    assert len(again) == 4
    again.extend(4, entries("B"))
    third = LineIndex(tmp_path)
    assert third.record(4) is not None
    assert third.record(4)[0] == line_digest(b"B")  # type: ignore[index]
    (tmp_path / "lines.bin").unlink()
    assert len(LineIndex(tmp_path)) == 4


def test_two_processes_number_the_same_lines_once(tmp_path: Path) -> None:
    """The second one's entries are known: nothing is added twice, the first one's times hold, the rest is added."""
    first, second = LineIndex(tmp_path), LineIndex(tmp_path)
    assert first.extend(0, entries("a", "b", time=1.0)) is False
    assert second.extend(0, entries("a", "b", "c", time=2.0)) is True
    assert [LineIndex(tmp_path).record(n) for n in range(3)] == [*entries("a", "b", time=1.0), *entries("c", time=2.0)]
    assert second.record(0) == entries("a", time=1.0)[0]
    assert first.extend(2, entries("c", time=3.0)) is True
    assert len(first) == 3


def test_other_lines_at_the_same_ordinals_are_refused(tmp_path: Path) -> None:
    """MovedError, and the index is as the first process left it."""
    first, second = LineIndex(tmp_path), LineIndex(tmp_path)
    first.extend(0, entries("a", "b"))
    with pytest.raises(MovedError):
        second.extend(0, entries("a", "X"))
    assert len(LineIndex(tmp_path)) == 2


def test_a_cut_that_another_process_saw_is_noticed_at_once(tmp_path: Path) -> None:
    """MovedError for extend and for cut, even when no record was added since; after load() all is well."""
    first, second = LineIndex(tmp_path), LineIndex(tmp_path)
    first.extend(0, entries("a", "b", "c"))
    second.load()
    first.cut(1)
    with pytest.raises(MovedError):
        second.extend(3, entries("d"))
    second = LineIndex(tmp_path)
    first.cut(0)
    with pytest.raises(MovedError):
        second.cut(2)
    second.load()
    second.extend(3, entries("A"))
    assert second.starts == [(0, 3)]


def test_a_cut_counts_what_another_process_added(tmp_path: Path) -> None:
    """The new stretch begins at 5: above the two lines that the other one numbered meanwhile."""
    first, second = LineIndex(tmp_path), LineIndex(tmp_path)
    first.extend(0, entries("a", "b", "c"))
    second.extend(0, entries("a", "b", "c", "d", "e"))
    assert first.cut(1) == 5


def test_an_index_that_was_deleted_under_a_reader_is_refused(tmp_path: Path) -> None:
    """MovedError instead of entries at the wrong ordinals."""
    index = LineIndex(tmp_path)
    index.extend(0, entries("a", "b", "c"))
    (tmp_path / "lines.bin").unlink()
    with pytest.raises(MovedError):
        index.extend(3, entries("d"))


def test_many_threads_extend_one_index(tmp_path: Path) -> None:
    """Every line once, in order, whoever comes first."""
    lines = [f"line {n}" for n in range(40)]
    errors: list[Exception] = []

    def work() -> None:
        try:
            index = LineIndex(tmp_path)
            while len(index) < len(lines):
                at = len(index)
                index.extend(at, entries(*lines[at : at + 3]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    index = LineIndex(tmp_path)
    assert [(index.record(n) or (b"", 0))[0] for n in range(len(index))] == [digest for digest, _ in entries(*lines)]


def test_lines_are_not_numbered_through_a_link(tmp_path: Path) -> None:
    """OSError, and nothing is written into the link's target."""
    victim = tmp_path / "victim"
    victim.touch()
    index = LineIndex(tmp_path / "state")
    (tmp_path / "state").mkdir()
    (tmp_path / "state/lines.bin").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        index.extend(0, entries("a"))
    assert victim.read_bytes() == b""
