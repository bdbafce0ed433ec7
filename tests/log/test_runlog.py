"""The rows and files of one log_path, as a mirror reads them."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runmirror.log import runlog
from runmirror.log.index import LineIndex
from runmirror.log.rows import START, Position, Row, decode
from runmirror.log.runlog import CUT, RunLog
from runmirror.storage import LocalStorage
from tests.logs import (
    STARTED,
    async_rows,
    eval_row,
    flat_log,
    nested_log,
    resumed_rows,
    train_row,
    write_rows,
)


def lines_of(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def put(folder: Path, data: bytes | Iterable[dict[str, Any]], name: str = "metrics.jsonl") -> Path:
    """Replace the metrics in one step, as tinker-cookbook does."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{name}.new"
    new.write_bytes(data if isinstance(data, bytes) else lines_of(data))
    os.utime(new, (STARTED, STARTED))
    os.replace(new, folder / name)
    return folder


def add(folder: Path, data: bytes | Iterable[dict[str, Any]]) -> None:
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(data if isinstance(data, bytes) else lines_of(data))


def read(folder: Path, **options: Any) -> list[Row]:
    return list(RunLog(LocalStorage(folder), **options).rows(START))


class Reader:
    """A mirror's way to read: it keeps its position and asks for what came since."""

    def __init__(self, folder: Path, index: Path | None = None, **options: Any) -> None:
        self.log = RunLog(LocalStorage(folder), index=LineIndex(index), **options)
        self.position = START

    def poll(self) -> list[Row]:
        rows = list(self.log.rows(self.position))
        ordinals = [row.ordinal for row in rows]
        assert ordinals == list(range(self.position.ordinal, self.position.ordinal + len(rows)))
        if rows:
            self.position = rows[-1].position
        return rows


def short(rows: Iterable[Row]) -> list[tuple[int, int | str]]:
    """(ordinal, step), or "cut" for a row that is gone."""
    return [(row.ordinal, "cut" if row.fault == CUT else row.step) for row in rows]


def small(*steps: int, mark: str = "a") -> list[dict[str, Any]]:
    return [{"step": step, mark: step / 2} for step in steps]


# -- the shapes of real logs


def check_shape(rows: list[Row], data: list[dict[str, Any]], rewinds: dict[int, int]) -> None:
    assert [row.ordinal for row in rows] == list(range(len(data)))
    assert [row.step for row in rows] == [line["step"] for line in data]
    assert {row.ordinal: row.rewind for row in rows if row.rewind is not None} == rewinds
    assert not any(row.summary or row.fault for row in rows)
    for row, line in zip(rows, data, strict=True):
        numbers = {k: v for k, v in line.items() if k != "step" and isinstance(v, (int, float))}
        assert row.scalars() == numbers or any(v != v for v in numbers.values())


@pytest.mark.parametrize("with_index", [False, True])
def test_every_shape_of_log_is_read_whole(tmp_path: Path, with_index: bool) -> None:
    """Dense ordinals, the rows' steps, every number; only the resumed log goes back, once, to step 4."""
    flat_log(tmp_path / "flat")
    nested_log(tmp_path / "nested")
    write_rows(tmp_path / "async/metrics.jsonl", async_rows())
    write_rows(tmp_path / "resumed/metrics.jsonl", resumed_rows())
    for name, rewinds in {"flat": {}, "nested": {}, "async": {}, "resumed": {6: 4}}.items():
        folder = tmp_path / name
        data = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
        check_shape(read(folder, index=LineIndex() if with_index else None), data, rewinds)


def test_real_logs_are_read_whole(samples: Path) -> None:
    """As the made-up ones: in the real samples only the resumed log goes back, at its second row of step 4."""
    named = [(samples / "tinker_flat", "metrics.jsonl"), (samples / "tinker_newlayout", "metrics.jsonl")]
    named += [(samples, f"tinker_{name}_metrics.jsonl") for name in ("async_061", "resumed_058")]
    for folder, metrics in named:
        data = [json.loads(line) for line in (folder / metrics).read_bytes().splitlines()]
        rows = read(folder, metrics=metrics, index=LineIndex())
        check_shape(rows, data, {6: 4} if "resumed" in metrics else {})
        assert [row.time for row in rows] == sorted(row.time for row in rows)
        assert read(folder, metrics=metrics) == rows


def test_a_missing_log_is_an_empty_one(tmp_path: Path) -> None:
    """No rows and no error, before the file or its folder is there; then the rows come."""
    reader = Reader(tmp_path / "run")
    assert reader.poll() == []
    put(tmp_path / "run", small(0, 1))
    assert short(reader.poll()) == [(0, 0), (1, 1)]
    assert reader.poll() == []


def test_rows_start_where_asked(tmp_path: Path) -> None:
    """At the position's ordinal; again from the start when asked; nothing when it is ahead of the log."""
    log = RunLog(LocalStorage(put(tmp_path, small(*range(5)))))
    assert short(log.rows(Position(3))) == [(3, 3), (4, 4)]
    assert len(list(log.rows(START))) == 5
    assert short(log.rows(Position(4))) == [(4, 4)]
    assert list(log.rows(Position(9))) == []
    add(tmp_path, small(*range(5, 11)))
    assert short(log.rows(Position(9))) == [(9, 9), (10, 10)]


def test_an_abandoned_reading_can_go_on(tmp_path: Path) -> None:
    """From any row, though the log was read further ahead."""
    log = RunLog(LocalStorage(put(tmp_path, small(*range(50)))), index=LineIndex())
    with mock.patch.object(runlog, "CHUNK", 100):
        rows = log.rows(START)
        first = [next(rows) for _ in range(7)]
        rows.close()
        rest = list(log.rows(first[-1].position))
    assert [row.step for row in first + rest] == list(range(50))


@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])
def test_blocks_of_any_size_give_the_same_rows(tmp_path: Path, chunk: int) -> None:
    """The rows of a single block, also with blank and broken lines, CRLF and no last newline."""
    put(tmp_path, lines_of(resumed_rows()) + b"\n{broken\n" + b'{"step": 9}\r\n' + b'{"step": 10, "a": 1}')
    whole = read(tmp_path)
    with mock.patch.object(runlog, "CHUNK", chunk):
        assert read(tmp_path) == whole
        assert [row.end for row in read(tmp_path, index=LineIndex())] == [row.end for row in whole]
    assert whole[-1].end == (tmp_path / "metrics.jsonl").stat().st_size


# -- torn lines


@pytest.mark.slow
@pytest.mark.parametrize("with_index", [False, True])
def test_a_log_cut_at_every_byte(tmp_path: Path, with_index: bool) -> None:
    """Exactly the whole rows, and once the rest is there exactly the remaining ones."""
    rows = small(*range(50))
    data = lines_of(rows)
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        log = RunLog(LocalStorage(tmp_path), index=LineIndex() if with_index else None)
        first = list(log.rows(START))
        whole = data[:cut].count(b"\n") + (data[cut : cut + 1] == b"\n")
        assert [row.data for row in first] == rows[:whole], cut
        after = first[-1].position if first else START
        assert list(log.rows(after)) == []
        assert log.is_complete_at(after) is (data[:cut].rpartition(b"\n")[2] in (b"", first[-1].line if first else b""))
        with open(path, "ab") as file:
            file.write(data[cut:])
        rest = list(log.rows(after))
        assert [row.data for row in first + rest] == rows, cut
        assert [row.ordinal for row in first + rest] == list(range(50))
        assert log.is_complete_at(rest[-1].position if rest else after)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_late_newline_is_no_line(tmp_path: Path, newline: bytes) -> None:
    """Byte by byte after a whole object without one; and the line keeps its ordinal for the next process."""
    put(tmp_path / "run", b'{"step": 0}' + newline + b'{"step": 1}')
    reader = Reader(tmp_path / "run", tmp_path / "index")
    assert short(reader.poll()) == [(0, 0), (1, 1)]
    for byte in newline:
        assert reader.log.is_complete_at(reader.position)
        add(tmp_path / "run", bytes([byte]))
        assert reader.poll() == []
    assert reader.log.is_complete_at(reader.position)
    add(tmp_path / "run", b'{"step": 2}' + newline)
    assert short(reader.poll()) == [(2, 2)]
    assert reader.log.broken == []
    again = Reader(tmp_path / "run", tmp_path / "index")
    assert short(again.poll()) == [(0, 0), (1, 1), (2, 2)]


def test_a_tail_of_nuls_is_no_whole_line(tmp_path: Path) -> None:
    """After a power cut: the row comes once the writer has repaired the file, and once only."""
    put(tmp_path / "run", b'{"step": 0}\n{"step": 1}\0\0\0')
    reader = Reader(tmp_path / "run", tmp_path / "index")
    assert short(reader.poll()) == [(0, 0)]
    assert not reader.log.is_complete_at(reader.position)
    put(tmp_path / "run", b'{"step": 0}\n{"step": 1}\n')
    assert short(reader.poll()) == [(1, 1)]


def test_a_blank_line_is_not_a_late_newline(tmp_path: Path) -> None:
    """A row with a fault, and the log is not complete before it."""
    put(tmp_path, b'{"step": 0}\n')
    reader = Reader(tmp_path)
    reader.poll()
    add(tmp_path, b"\n")
    assert not reader.log.is_complete_at(reader.position)
    assert [row.fault for row in reader.poll()] == ["metrics.jsonl:2: blank line"]
    assert reader.log.is_complete_at(reader.position)


def test_a_record_glued_to_a_torn_one_is_one_broken_line(tmp_path: Path) -> None:
    """As every reader of the file sees it: the row that was whole was delivered, the glued line is named."""
    put(tmp_path / "run", b'{"step": 0}\n{"step": 1}')
    reader = Reader(tmp_path / "run", tmp_path / "index")
    assert short(reader.poll()) == [(0, 0), (1, 1)]
    add(tmp_path / "run", b'{"step": 2}\n{"step": 3}\n')
    rows = reader.poll()
    assert [(row.ordinal, row.fault) for row in rows] == [(2, "metrics.jsonl:2: broken line"), (3, "")]
    again = Reader(tmp_path / "run", tmp_path / "index")
    assert [(row.ordinal, row.fault) for row in again.poll()][1:] == [(1, CUT), (2, rows[0].fault), (3, "")]


# -- what lines may hold

BAD_LINES = [b"", b"   ", b"\t\r", b"{", b"nonsense", b"\0\0\0\0", b"[1, 2]", b"5", b"null", b'"text"', b'{"a": 1}}']
BAD_LINES += [b'{"a": 1} {"b": 2}', b"{'a': 1}", b'{"a": 1e}', b"[" * 5000, b'{"a":' * 5000]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda bad: repr(bad[:12]))
def test_a_bad_line_is_a_row_with_a_fault(tmp_path: Path, bad: bytes) -> None:
    """It keeps its ordinal, carries nothing, and is named with its line; the rows around it are whole."""
    put(tmp_path, b'{"step": 3, "a": 1}\n' + bad + b'\n{"step": 4, "a": 2}\n')
    for index in (None, LineIndex()):
        log = RunLog(LocalStorage(tmp_path), index=index)
        rows = list(log.rows(START))
        assert [(row.ordinal, row.step, row.data.get("a")) for row in rows] == [(0, 3, 1), (1, 3, None), (2, 4, 2)]
        what = "broken" if bad.strip() else "blank"
        assert rows[1].fault == f"metrics.jsonl:2: {what} line"
        assert (rows[1].data, rows[1].summary, rows[1].rewind) == ({}, False, None)
        assert rows[1].time == rows[0].time
        assert (log.broken, log.broken_count) == ([rows[1].fault], 1)


def test_a_log_of_bad_lines_alone(tmp_path: Path) -> None:
    """Rows with faults, the first hundred named, all counted, also when read again."""
    put(tmp_path, b"x\n" * 150)
    log = RunLog(LocalStorage(tmp_path), index=LineIndex())
    for _ in range(2):
        rows = list(log.rows(START))
        assert len(rows) == 150
        assert all(row.fault and row.step == 0 for row in rows)
        assert (len(log.broken), log.broken_count) == (100, 150)


ODD_LINES: list[tuple[bytes, dict[str, float]]] = [
    (b'{"a": NaN, "b": Infinity, "c": -Infinity}', {"a": math.nan, "b": math.inf, "c": -math.inf}),
    (b'{"a": null, "b": null, "_nonfinite": {"a": "nan"}}', {"a": math.nan}),
    (b'{"a": null, "b": null, "_nonfinite": {"a": "inf", "b": "-inf"}}', {"a": math.inf, "b": -math.inf}),
    (b'{"a": null, "_nonfinite": "nonsense"}', {}),
    (b'{"a": 1180591620717411303424}', {"a": 2.0**70}),
    (b'{"a": 1' + b"0" * 400 + b"}", {"a": math.inf}),
    (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
    (b'\0\0{"a": 1}', {"a": 1}),
    (b'{"a": 1}\r', {"a": 1}),
    (b'  {"a": 1}  ', {"a": 1}),
    (b'{"a": 1, "a": 2}', {"a": 2}),
    (b'{"a": true, "b": false}', {"a": 1, "b": 0}),
    (b'{"a": "text", "b": [1], "c": {"d": 1}, "e": null}', {}),
    (b'{"a": 1, "t": "\xff\xfe"}', {"a": 1}),
    (b'{"a": 1, "t": "\\ud800"}', {"a": 1}),
    (b'{"a": 1, "_hidden": 2, "_timestamp": 3}', {"a": 1}),
    (b'{"' + "ключ/日本".encode() + b'": 1.5}', {"ключ/日本": 1.5}),
]


@pytest.mark.parametrize(("line", "scalars"), ODD_LINES, ids=lambda line: repr(line)[:16])
def test_odd_lines_are_read(tmp_path: Path, line: bytes, scalars: dict[str, float]) -> None:
    """Their numbers, with and without an index, between ordinary rows; no fault."""
    put(tmp_path, b'{"step": 0, "x": 1}\n' + line + b'\n{"step": 1, "x": 1}\n')
    for index in (None, LineIndex()):
        rows = read(tmp_path, index=index)
        assert not any(row.fault for row in rows)
        assert repr(rows[1].scalars()) == repr(scalars)
        assert rows[1].line == line


def test_text_stays_text(tmp_path: Path) -> None:
    """text() has it, scalars() has not."""
    put(tmp_path, [{"step": 0, "note": "hello", "_hidden": "x", "a": 1}])
    assert (read(tmp_path)[0].text(), read(tmp_path)[0].scalars()) == ({"note": "hello"}, {"a": 1})


def test_a_line_of_five_megabytes(tmp_path: Path) -> None:
    """Read whole, also while it is still growing, and the rows after it."""
    big = {"step": 1, "text": "x" * 5_000_000, "a": 2.5}
    data = lines_of([big])
    put(tmp_path, lines_of(small(0)) + data[:3_000_000])
    reader = Reader(tmp_path)
    assert short(reader.poll()) == [(0, 0)]
    add(tmp_path, data[3_000_000:] + lines_of(small(2)))
    rows = reader.poll()
    assert short(rows) == [(1, 1), (2, 2)]
    assert rows[0].scalars() == {"a": 2.5}
    assert reader.log.info().config is None


# -- steps


def test_rows_without_a_step(tmp_path: Path) -> None:
    """A log that has no steps counts its rows; in one that has, a row without is a summary at the highest step."""
    put(tmp_path / "none", [{"a": 1}, {"a": 2}, {"a": 3}])
    assert [(row.step, row.summary) for row in read(tmp_path / "none")] == [(0, False), (1, False), (2, False)]
    put(tmp_path / "some", [{"a": 1}, *small(5, 7), {"a": 2}, {"step": 6, "b": 1}, {"final": 3}])
    for index in (None, LineIndex()):
        rows = read(tmp_path / "some", index=index)
        assert [(row.step, row.summary) for row in rows] == [
            *((0, False), (5, False), (7, False)),
            *((7, True), (6, False), (7, True)),
        ]


def test_a_log_with_own_times_tells_the_same_summaries_with_and_without_an_index(tmp_path: Path) -> None:
    """The short way for plain rows knows as much as the long one."""
    stamps = {"_timestamp": 1_700_000_000.5}
    data = [{"a": 1} | stamps, {"step": 4, "a": 1} | stamps, {"step": 5} | stamps, {"a": 1} | stamps]
    put(tmp_path, data)
    plain, indexed = read(tmp_path), read(tmp_path, index=LineIndex())
    assert plain == indexed
    assert [(row.step, row.summary) for row in plain] == [(0, False), (4, False), (5, False), (5, True)]


def test_odd_steps(tmp_path: Path) -> None:
    """A float counts, a bool or text or a number beyond int64 does not: then the next key, else a summary."""
    put(tmp_path, b'{"step": 2.0}\n{"step": true}\n{"step": 1e30}\n{"step": "9", "global_step": 8}\n{"step": -4}\n')
    rows = read(tmp_path)
    assert [(row.step, row.summary) for row in rows] == [(2, False), (2, True), (2, True), (8, False), (-4, False)]
    put(tmp_path, b'{"step": 9223372036854775808, "a": 1}\n{"step": 9223372036854775807, "a": 1}\n')
    assert [(row.step, row.summary) for row in read(tmp_path)] == [(0, False), (2**63 - 1, False)]


def test_a_step_key_of_the_user(tmp_path: Path) -> None:
    """It alone is the step; a row without it is a summary."""
    put(tmp_path, [{"step": 0, "env/steps": 100}, {"step": 1, "env/steps": 200}, {"step": 2}])
    rows = read(tmp_path, step_key="env/steps")
    assert [(row.step, row.summary) for row in rows] == [(100, False), (200, False), (200, True)]


def test_an_adapter_turns_other_shapes_into_ours(tmp_path: Path) -> None:
    """verl's {"step", "data"}: flat rows with their steps, also where the log goes back."""
    steps = (0, 1, 2, 1)
    put(tmp_path, [{"step": step, "data": {"a": step, "b": 1}} for step in steps])
    rows = read(tmp_path, adapt=lambda data: {"step": data["step"]} | data["data"])
    assert [row.scalars() for row in rows] == [{"a": step, "b": 1} for step in steps]
    assert [row.rewind for row in rows] == [None, None, None, 1]


def test_the_row_before_a_rewind_may_have_been_read_without_its_newline(tmp_path: Path) -> None:
    """It counts all the same: the row behind it goes back, as it does when all is read at once."""
    data = lines_of([{"step": 1, "a": 1}, {"step": 5, "b": 1}, {"step": 3, "b": 2}])
    cut = data.index(b'\n{"step": 3')
    put(tmp_path, data[:cut])
    reader = Reader(tmp_path)
    reader.poll()
    add(tmp_path, data[cut:])
    assert [row.rewind for row in reader.poll()] == [row.rewind for row in read(tmp_path)][2:] == [3]


# -- our own logs


def own_log(folder: Path, journal: list[dict[str, Any]], rows: Iterable[dict[str, Any]] = ()) -> Path:
    (folder / ".runmirror").mkdir(parents=True, exist_ok=True)
    record = {"format": 1, "run_id": "r" * 32, "url": folder.as_uri(), "created": STARTED}
    (folder / ".runmirror/run.json").write_text(json.dumps(record))
    (folder / ".runmirror/journal.jsonl").write_bytes(lines_of(journal))
    return put(folder, rows)


def own_rows(*steps: int, mark: str = "a") -> list[dict[str, Any]]:
    return [{"step": step, "_timestamp": STARTED + step, mark: 0.5} for step in steps]


STARTED_ENTRY = {"event": "started", "time": STARTED, "offset": 0}


@pytest.mark.parametrize("with_index", [False, True])
def test_a_journals_resume_makes_the_next_row_a_rewind(tmp_path: Path, with_index: bool) -> None:
    """When its step is not above the highest; a repeated or backward step without a resume is none."""
    first, second, third = own_rows(0, 1, 2, 3, 3, 1), own_rows(2, 3, 4), own_rows(5, 4)
    offsets = [len(lines_of(first)), len(lines_of(first + second))]
    journal = [STARTED_ENTRY] + [{"event": "resumed", "time": STARTED, "offset": offset} for offset in offsets]
    folder = own_log(tmp_path, journal, first + second + third)
    rows = read(folder, index=LineIndex() if with_index else None)
    assert {row.ordinal: row.rewind for row in rows if row.rewind is not None} == {6: 2}


def test_a_summary_after_a_resume_does_not_use_it_up(tmp_path: Path) -> None:
    """The first row with a step is the rewind; a summary carries the highest step."""
    first = [*own_rows(0, 1, 2), {"_timestamp": STARTED, "best": 1}]
    journal = [STARTED_ENTRY, {"event": "resumed", "time": STARTED, "offset": len(lines_of(first))}]
    folder = own_log(tmp_path, journal, [*first, {"_timestamp": STARTED, "best": 2}, *own_rows(1, 2)])
    rows = read(folder)
    assert [(row.step, row.summary, row.rewind) for row in rows] == [
        *((0, False, None), (1, False, None), (2, False, None)),
        *((2, True, None), (2, True, None), (1, False, 1), (2, False, None)),
    ]


def test_two_resumes_without_a_row_between_are_one(tmp_path: Path) -> None:
    """A resume that crashed at once: one rewind."""
    first = own_rows(0, 1, 2)
    entry = {"event": "resumed", "time": STARTED, "offset": len(lines_of(first))}
    rows = read(own_log(tmp_path, [STARTED_ENTRY, entry, entry], first + own_rows(1, 1)))
    assert [row.rewind for row in rows] == [None, None, None, 1, None]


def test_a_resume_is_seen_by_a_reader_in_mid_reading(tmp_path: Path) -> None:
    """A writer that resumes while a mirror is still busy with the rows before: the rewind is at the right row."""
    first = own_rows(*range(40))
    folder = own_log(tmp_path, [STARTED_ENTRY], first)
    log = RunLog(LocalStorage(folder))
    with mock.patch.object(runlog, "CHUNK", 200):
        rows = log.rows(START)
        found = [next(rows)]
        entry = {"event": "resumed", "time": STARTED, "offset": len(lines_of(first))}
        with open(folder / ".runmirror/journal.jsonl", "ab") as file:
            file.write(lines_of([entry]))
        add(folder, own_rows(20, 21))
        found += rows
    assert {row.ordinal: row.rewind for row in found if row.rewind is not None} == {40: 20}


def test_an_own_log_without_a_step_in_its_first_row_begins_with_a_summary(tmp_path: Path) -> None:
    """log_summary before the first step: a summary at step 0, as a live reader and a later one both say."""
    folder = own_log(tmp_path, [STARTED_ENTRY], [{"_timestamp": STARTED, "a": 1}, *own_rows(3)])
    assert [(row.step, row.summary) for row in read(folder)] == [(0, True), (3, False)]


# -- logs that shrink or are replaced


def test_a_log_that_tinker_cookbook_cut_at_a_resume(tmp_path: Path) -> None:
    """Unchanged lines keep 0 to 3; 4 to 7, of which 6 and 7 were not delivered, are gone; new ones go on at 8."""
    folder, index = tmp_path / "run", tmp_path / "index"
    put(folder, small(*range(6)))
    reader, ahead = Reader(folder, index), Reader(folder, index)
    assert short(reader.poll()) == [(n, n) for n in range(6)]
    add(folder, small(6, 7))
    assert len(ahead.poll()) == 8
    os.replace(folder / "metrics.jsonl", folder / "metrics.jsonl.pre_resume_000004")
    put(folder, small(0, 1, 2, 3))
    assert reader.poll() == []
    add(folder, small(4, 5, mark="b"))
    rows = reader.poll()
    assert short(rows) == [(6, "cut"), (7, "cut"), (8, 4), (9, 5)]
    assert [(row.rewind, row.data == {}, row.scalars() == {}) for row in rows[:2]] == [(None, True, True)] * 2
    assert [row.rewind for row in rows[2:]] == [4, None]
    assert short(ahead.poll()) == [(8, 4), (9, 5)]
    again = Reader(folder, index).poll()
    assert short(again) == [(n, n) for n in range(4)] + [(n, "cut") for n in range(4, 8)] + [(8, 4), (9, 5)]
    assert [row.rewind for row in again] == [None] * 8 + [4, None]


def test_a_log_can_be_cut_again_and_deeper(tmp_path: Path) -> None:
    """Every new stretch goes on above the highest ordinal ever; the same comes out after reopening."""
    folder, index = tmp_path / "run", tmp_path / "index"
    reader = Reader(folder, index)
    put(folder, small(0, 1, 2, 3))
    reader.poll()
    put(folder, small(0, 1) + small(2, 3, mark="b"))
    assert short(reader.poll()) == [(4, 2), (5, 3)]
    put(folder, small(0, 1) + small(2, mark="b") + small(3, mark="c"))
    rows = reader.poll()
    assert short(rows) == [(6, 3)]
    assert rows[0].rewind == 3
    put(folder, small(0) + small(1, mark="d"))
    rows = reader.poll()
    assert (short(rows), rows[0].rewind) == ([(7, 1)], 1)
    put(folder, b"")
    assert reader.poll() == []
    put(folder, small(0, 1, mark="e"))
    rows = reader.poll()
    assert (short(rows), rows[0].rewind) == ([(8, 0), (9, 1)], 0)
    again = Reader(folder, index).poll()
    assert short(again) == [*((n, "cut") for n in range(8)), (8, 0), (9, 1)]


def test_a_cut_log_that_grows_past_its_old_size_between_two_looks(tmp_path: Path) -> None:
    """The last line that was read is another one now: the new rows come, none of the old twice."""
    reader = Reader(tmp_path / "run", tmp_path / "index")
    put(tmp_path / "run", small(0, 1, 2, 3))
    reader.poll()
    put(tmp_path / "run", small(0, 1) + small(*range(2, 9), mark="b"))
    assert short(reader.poll()) == [(n + 2, n) for n in range(2, 9)]


def test_a_log_replaced_by_another(tmp_path: Path) -> None:
    """All its rows come above the old ones, and supersede them all."""
    reader = Reader(tmp_path / "run", tmp_path / "index")
    put(tmp_path / "run", small(10, 11))
    reader.poll()
    put(tmp_path / "run", small(10, 11, 12, mark="b"))
    rows = reader.poll()
    assert short(rows) == [(2, 10), (3, 11), (4, 12)]
    assert [row.rewind for row in rows] == [0, None, None]


def test_a_removed_log_that_comes_back(tmp_path: Path) -> None:
    """Nothing while it is away; nothing twice when the same lines are there again."""
    reader = Reader(tmp_path / "run", tmp_path / "index")
    put(tmp_path / "run", small(0, 1))
    reader.poll()
    (tmp_path / "run/metrics.jsonl").unlink()
    assert reader.poll() == []
    put(tmp_path / "run", small(0, 1, 2))
    assert short(reader.poll()) == [(2, 2)]


def test_a_late_evaluation_right_after_a_cut_supersedes_no_line_that_is_still_there(tmp_path: Path) -> None:
    """The cut goes back to step 4, though the first new row is of step 2."""
    reader = Reader(tmp_path / "run", tmp_path / "index")
    put(tmp_path / "run", [train_row(step) for step in range(6)])
    reader.poll()
    put(tmp_path / "run", [train_row(step) for step in range(4)] + [eval_row(2), train_row(4, 0.5)])
    rows = reader.poll()
    assert short(rows) == [(6, 2), (7, 4)]
    assert [row.rewind for row in rows] == [4, None]


def test_a_broken_line_right_after_a_cut_does_not_hide_it(tmp_path: Path) -> None:
    """The first good row is the one that goes back."""
    reader = Reader(tmp_path / "run", tmp_path / "index")
    put(tmp_path / "run", small(0, 1, 2))
    reader.poll()
    put(tmp_path / "run", lines_of(small(0)) + b"broken\n" + lines_of(small(1, mark="b")))
    assert [(row.ordinal, row.rewind) for row in reader.poll()] == [(3, None), (4, 1)]


def test_a_log_that_is_rewritten_in_place(tmp_path: Path) -> None:
    """Emptied and written again with the same lines while we look at every byte: no row twice, then the new one."""
    folder, index = tmp_path / "run", tmp_path / "index"
    data = lines_of(small(*range(5)))
    put(folder, data)
    reader, other = Reader(folder, index), Reader(folder, index)
    reader.poll()
    path = folder / "metrics.jsonl"
    with open(path, "wb", buffering=0) as file:
        assert reader.poll() == []
        for byte in data:
            file.write(bytes([byte]))
            assert reader.poll() == []
        assert short(other.poll()) == [(n, n) for n in range(5)]
        file.write(lines_of(small(5)))
    assert short(reader.poll()) == [(5, 5)]


def test_a_log_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """No error: the rows that were there, then those that are there."""
    put(tmp_path / "run", small(*range(50)))
    reader = Reader(tmp_path / "run", tmp_path / "index")
    with mock.patch.object(runlog, "CHUNK", 100):
        rows = reader.log.rows(START)
        first = next(rows)
        os.truncate(tmp_path / "run/metrics.jsonl", 0)
        seen = [first, *rows]
    assert [row.step for row in seen] == list(range(len(seen)))
    reader.position = seen[-1].position
    put(tmp_path / "run", small(*range(50)))
    assert [row.step for row in reader.poll()] == list(range(len(seen), 50))


def test_two_processes_number_a_log_alike(tmp_path: Path) -> None:
    """In turns, through a cut that either sees first: equal ordinals, steps and times, and nothing twice."""
    folder, index = tmp_path / "run", tmp_path / "index"
    one, two = Reader(folder, index), Reader(folder, index)
    put(folder, small(0, 1))
    first = one.poll()
    add(folder, small(2))
    second = two.poll()
    first += one.poll()
    put(folder, small(0) + small(1, mark="b"))
    second += two.poll()
    add(folder, small(2, mark="b"))
    first += one.poll()
    second += two.poll()
    assert first == second
    assert short(first) == [(0, 0), (1, 1), (2, 2), (3, 1), (4, 2)]


def test_an_index_that_lost_its_stretches_never_uses_an_ordinal_again(tmp_path: Path) -> None:
    """lines.json damaged or gone: the rows behind the cut come once more, above all others, as a rewind."""
    folder, index = tmp_path / "run", tmp_path / "index"
    for damage in (lambda path: path.write_text("{nonsense"), lambda path: path.unlink()):
        reader = Reader(folder, index)
        put(folder, small(0, 1, 2))
        reader.poll()
        put(folder, small(0) + small(1, 2, mark="b"))
        reader.poll()
        highest = reader.position.ordinal
        damage(index / "lines.json")
        again = Reader(folder, index)
        again.position = reader.position
        rows = again.poll()
        assert short(rows) == [(highest, 1), (highest + 1, 2)]
        assert rows[0].rewind == 1
        add(folder, small(3, mark="b"))
        assert short(again.poll()) == [(highest + 2, 3)]
        assert short(reader.poll()) == [(highest, 1), (highest + 1, 2), (highest + 2, 3)]


def test_half_a_record_in_the_index(tmp_path: Path) -> None:
    """A process killed in mid-write: the row is numbered again, alike, by a new process and by one that goes on."""
    folder, index = tmp_path / "run", tmp_path / "index"
    put(folder, small(0, 1))
    reader = Reader(folder, index)
    reader.poll()
    with open(index / "lines.bin", "ab") as file:
        file.write(b"half")
    add(folder, small(2))
    assert short(Reader(folder, index).poll()) == [(0, 0), (1, 1), (2, 2)]
    assert short(reader.poll()) == [(2, 2)]
    assert (index / "lines.bin").stat().st_size == 48


def test_nothing_is_written_into_the_log_path(tmp_path: Path) -> None:
    """Its files are the same after reading with an index elsewhere."""
    folder = flat_log(tmp_path / "run")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    reader = Reader(folder, tmp_path / "index")
    reader.poll()
    reader.log.info()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# -- any sequence of events


@dataclass
class Model:
    """What a log and its readers do, told without looking at the code: lines, and the ordinal each one got."""

    folder: Path
    lines: bytes = b""
    numbered: list[bytes] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    versions: list[bytes] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.readers = [Reader(self.folder / "run", self.folder / "index") for _ in range(2)]
        (self.folder / "run").mkdir()

    def new_lines(self, number: int) -> bytes:
        self.count += number
        return lines_of({"step": n, "value": n / 4} for n in range(self.count - number, self.count))

    def write(self, data: bytes, *, append: bool) -> None:
        self.lines = self.lines + data if append else data
        (add if append else put)(self.folder / "run", data)

    def whole(self) -> list[bytes]:
        *lines, rest = self.lines.split(b"\n")
        return lines + ([rest] if rest and decode(rest) is not None else [])

    def poll(self, which: int) -> None:
        lines = self.whole()
        same = 0
        while same < min(len(lines), len(self.current)) and self.numbered[self.current[same]] == lines[same]:
            same += 1
        if same < len(lines):
            top = len(self.numbered)
            self.numbered += lines[same:]
            self.current = self.current[:same] + list(range(top, len(self.numbered)))
        here = dict(zip(self.current, lines, strict=False))
        reader = self.readers[which]
        start = reader.position.ordinal
        rows = reader.poll()
        assert [row.ordinal for row in rows] == list(range(start, max(here, default=-1) + 1))
        rewinds = dict(self.rewinds(here))
        for row in rows:
            line = here.get(row.ordinal)
            if line is None:
                assert (row.fault, row.data) == (CUT, {})
                continue
            data = decode(line)
            assert row.line == line
            assert (row.data, bool(row.fault)) == (data or {}, data is None)
            assert row.rewind == rewinds.get(row.ordinal)
            if not row.fault:
                assert self.times.setdefault(row.ordinal, row.time) == row.time
        assert reader.poll() == []

    def rewinds(self, here: dict[int, bytes]) -> Iterator[tuple[int, int]]:
        """(ordinal, step) of every row that goes back: the first good one behind a gap."""
        last, gap, highest = -1, False, None
        for number, (ordinal, line) in enumerate(here.items()):
            gap = gap or ordinal > last + 1
            last = ordinal
            data = decode(line)
            if data is None:
                continue
            if gap:
                yield ordinal, 0 if highest is None or not number else highest + 1
                gap = False
            highest = data["step"]


events = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("torn"), st.integers(1, 40)),
    st.tuples(st.just("cut"), st.integers(0, 6)),
    st.tuples(st.just("restore"), st.integers(0, 3)),
    st.tuples(st.just("rewrite"), st.integers(0, 40)),
    st.tuples(st.just("poll"), st.integers(0, 1)),
    st.tuples(st.just("poll"), st.integers(0, 1)),
    st.tuples(st.just("reopen"), st.integers(0, 1)),
)


@given(st.lists(events, max_size=25), st.sampled_from([5, 60, 1 << 17]))
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_events(sequence: list[tuple[str, int]], chunk: int) -> None:
    """Appends, torn appends, cuts, restored files, files rewritten in place, two readers, reopened: every reader gets
    dense ordinals, each line once per stretch with its own data, lost ones as empty rows, and one time for each."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(runlog, "CHUNK", chunk):
        model = Model(Path(folder))
        rest = b""
        for event, number in sequence:
            if event == "append":
                model.write(rest + model.new_lines(number), append=True)
                rest = b""
            elif event == "torn" and not rest:
                line = model.new_lines(1)
                number = min(number, len(line) - 1)
                rest = line[number:]
                model.write(line[:number], append=True)
            elif event == "cut":
                lines = model.lines.split(b"\n")[:-1]
                model.versions.append(model.lines if not rest else b"".join(line + b"\n" for line in lines))
                model.write(b"".join(line + b"\n" for line in lines[:number]), append=False)
                rest = b""
            elif event == "restore" and model.versions:
                model.write(model.versions[number % len(model.versions)], append=False)
                rest = b""
            elif event == "rewrite":
                whole = model.lines
                path = Path(folder) / "run/metrics.jsonl"
                path.write_bytes(whole[:number])
                model.lines = whole[:number]
                model.poll(number % 2)
                with open(path, "ab") as file:
                    file.write(whole[number:])
                model.lines = whole
            elif event == "poll":
                model.poll(number)
            elif event == "reopen":
                position = model.readers[number].position
                model.readers[number] = Reader(Path(folder) / "run", Path(folder) / "index")
                model.readers[number].position = position
        for which in (0, 1):
            model.poll(which)


# -- times


def test_rows_carry_their_own_time(tmp_path: Path) -> None:
    """_timestamp, also when it runs backwards; the log is marked "row"."""
    put(tmp_path, [{"step": n, "_timestamp": STARTED - n} for n in range(3)])
    log = RunLog(LocalStorage(tmp_path))
    assert [row.time for row in log.rows(START)] == [STARTED, STARTED - 1, STARTED - 2]
    assert log.info().time_source == "row"


@pytest.mark.parametrize("stamp", [-5.0, 1e300, 1.7e12])
def test_an_implausible_time_is_none(tmp_path: Path, stamp: float) -> None:
    """The row gets a time from the rows around it, with and without an index."""
    put(tmp_path, [{"step": n, "_timestamp": stamp if n == 1 else STARTED + n} for n in range(3)])
    for index in (None, LineIndex()):
        assert [row.time for row in read(tmp_path, index=index)] == [STARTED, STARTED, STARTED + 2]


def test_reports_and_durations_tell_the_times(tmp_path: Path) -> None:
    """Iteration 8 began at 16:08 and took 1.5 s, in the flat and in the nested layout; marked "logtree"."""
    for folder in (flat_log(tmp_path / "flat"), nested_log(tmp_path / "nested")):
        log = RunLog(LocalStorage(folder))
        times = [row.time for row in log.rows(START)]
        assert times[0] == STARTED_AT + 1.5
        assert times[8] == STARTED_AT + 8 * 60 + 1.5
        assert times[9] == times[8] + 1.5
        assert times == sorted(times)
        assert log.info().time_source == "logtree"
        east = read(folder, zone=timezone(timedelta(hours=2)))
        assert [row.time for row in east] == [when - 7200 for when in times]


STARTED_AT = 1764000000.0
"""2025-11-24T16:00:00 UTC, the start of iteration 0 in tests/logs.py."""


def test_without_reports_the_modification_time_tells(tmp_path: Path) -> None:
    """The last row at it, the others before by their durations: never now; marked "mtime"."""
    log = RunLog(LocalStorage(put(tmp_path, [train_row(step) for step in range(4)])))
    assert [row.time for row in log.rows(START)] == [STARTED - 4.5, STARTED - 3.0, STARTED - 1.5, STARTED]
    info = log.info()
    assert (info.time_source, info.start, info.end, info.status) == ("mtime", STARTED - 4.5, STARTED, "killed")


def test_times_are_frozen_once_used(tmp_path: Path) -> None:
    """The same after a touch, after more rows, and for a new process; rows added later are not before them."""
    folder, index = tmp_path / "run", tmp_path / "index"
    put(folder, [train_row(step) for step in range(3)])
    first = [row.time for row in Reader(folder, index).poll()]
    os.utime(folder / "metrics.jsonl", (STARTED + 9e6, STARTED + 9e6))
    assert [row.time for row in Reader(folder, index).poll()] == first
    add(folder, [train_row(3), train_row(4)])
    os.utime(folder / "metrics.jsonl", (STARTED - 50, STARTED - 50))
    later = Reader(folder, index)
    assert [row.time for row in later.poll()] == [*first, first[-1], first[-1]]
    assert later.log.info().start == first[0]


def test_rows_seen_arriving_have_that_time(tmp_path: Path) -> None:
    """Now, when the log was read to its end a moment before, also after it was cut; marked "arrival"."""
    folder, index = tmp_path / "run", tmp_path / "index"
    put(folder, b"")
    reader = Reader(folder, index)
    reader.poll()
    before = time.time()
    add(folder, small(0, 1))
    rows = reader.poll()
    put(folder, small(0) + small(1, mark="b"))
    rows += reader.poll()
    assert all(before <= row.time <= time.time() for row in rows)
    assert [row.time for row in rows] == sorted(row.time for row in rows)
    assert reader.log.time_source in ("arrival", "inferred")
    again = Reader(folder, index).poll()
    assert [again[0].time, again[2].time] == [rows[0].time, rows[2].time]


def test_rows_long_after_the_last_look_are_not_seen_arriving(tmp_path: Path) -> None:
    """The modification time, when nobody looked for longer than the window."""
    put(tmp_path, small(0))
    reader = Reader(tmp_path)
    reader.poll()
    with mock.patch.object(runlog, "ARRIVAL_WINDOW", -1.0):
        add(tmp_path, small(1))
        os.utime(tmp_path / "metrics.jsonl", (STARTED + 70, STARTED + 70))
        assert [row.time for row in reader.poll()] == [STARTED + 70]


def test_a_log_continued_with_timestamps_keeps_its_old_rows_old(tmp_path: Path) -> None:
    """Rows without a time end where the first one with a time begins, whenever the file was touched."""
    put(tmp_path, [train_row(0), train_row(1), train_row(2) | {"_timestamp": STARTED - 1e6}])
    os.utime(tmp_path / "metrics.jsonl")
    assert [row.time for row in read(tmp_path)] == [STARTED - 1e6 - 3.0, STARTED - 1e6 - 1.5, STARTED - 1e6]


def test_a_log_that_is_emptied_while_its_times_are_looked_for(tmp_path: Path) -> None:
    """No error: the rows that were read get the modification time."""
    put(tmp_path, small(0, 1))
    log = RunLog(LocalStorage(tmp_path))
    real = LocalStorage.read_range
    calls = 0

    def read_range(self: LocalStorage, path: str, offset: int, length: int | None = None) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.truncate(tmp_path / "metrics.jsonl", 0)
            os.utime(tmp_path / "metrics.jsonl", (STARTED, STARTED))
        return real(self, path, offset, length)

    with mock.patch.object(LocalStorage, "read_range", read_range):
        assert [row.time for row in log.rows(START)] == [STARTED, STARTED]


# -- the rest of a Source


def test_what_is_known_of_a_foreign_run(tmp_path: Path) -> None:
    """Finished by its final checkpoint, with config, start and end, before and after its rows were read."""
    log = RunLog(LocalStorage(flat_log(tmp_path)), "group/run")
    info = log.info()
    assert (info.name, info.status, info.status_known, info.source) == (
        "group/run",
        "finished",
        True,
        "tinker-cookbook",
    )
    assert info.config == {"learning_rate": 4e-05, "model": {"name": "tiny", "rank": 8}}
    rows = list(log.rows(START))
    assert (log.info().start, log.info().end) == (rows[0].time, rows[-1].time)
    assert log.info().run_id == info.run_id
    assert log.storage.exists(log.metrics)


def test_a_run_whose_last_row_does_not_tell_is_still_finished(tmp_path: Path) -> None:
    """done_frac = 1 in a row before the final evaluation and the token counts, as tinker-cookbook 0.6.1 writes them."""
    rows = [train_row(step) for step in range(12)] + [eval_row(12), {"step": 12, "cost/tokens_total": 9}]
    log = RunLog(LocalStorage(put(tmp_path, rows)))
    assert log.info().status == "finished"
    assert len(list(log.rows(START))) == 14
    assert log.info().status == "finished"


def test_a_fresh_foreign_run_is_running_and_has_no_end(tmp_path: Path) -> None:
    """By its modification time; a silent one is killed unless the user says otherwise."""
    put(tmp_path, small(0, 1))
    log = RunLog(LocalStorage(tmp_path))
    assert (log.info().status, log.info().status_known) == ("killed", False)
    log = RunLog(LocalStorage(tmp_path), status_unknown="finished")
    assert (log.info().status, log.info().status_known) == ("finished", True)
    os.utime(tmp_path / "metrics.jsonl")
    assert (log.info().status, log.info().end) == ("running", None)


def test_a_run_whose_writer_is_gone_is_killed_however_fresh(tmp_path: Path) -> None:
    """Unless it said how it ended."""
    put(tmp_path, small(0))
    os.utime(tmp_path / "metrics.jsonl")
    log = RunLog(LocalStorage(tmp_path))
    log.writer_gone = True
    assert (log.info().status, log.info().status_known) == ("killed", False)
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "final"}')
    assert (log.info().status, log.info().status_known) == ("finished", True)


def test_what_is_known_of_our_own_run(tmp_path: Path) -> None:
    """Its id, and start, end and status by the journal."""
    ended = {"event": "finished", "time": STARTED + 99, "status": "failed", "offset": 5}
    info = RunLog(LocalStorage(own_log(tmp_path, [STARTED_ENTRY, ended], own_rows(0)))).info()
    assert (info.run_id, info.source) == ("r" * 32, "runmirror")
    assert (info.start, info.end, info.status, info.status_known) == (STARTED, STARTED + 99, "failed", True)


def test_an_empty_run(tmp_path: Path) -> None:
    """No start, no end, no config, no files; silent."""
    log = RunLog(LocalStorage(put(tmp_path, b"")))
    info = log.info()
    assert (info.start, info.end, info.config, info.status) == (None, None, None, "killed")
    assert log.files(frozenset({"config", "report"})) == []
    assert log.is_complete_at(START)


@pytest.mark.parametrize("data", [b"\n", b"\r\n", b"{}"])
def test_a_log_with_something_in_it_is_not_complete_at_its_start(tmp_path: Path, data: bytes) -> None:
    """Even a blank line is a row to deliver."""
    log = RunLog(LocalStorage(put(tmp_path, data)))
    assert not log.is_complete_at(START)
    assert len(list(log.rows(START))) == 1


def test_complete_at_a_position(tmp_path: Path) -> None:
    """Behind the last row only, told by offset and digest; not when a count alone is known, nor when it was replaced."""
    log = RunLog(LocalStorage(put(tmp_path, small(0, 1, 2))))
    rows = list(log.rows(START))
    assert [log.is_complete_at(row.position) for row in rows] == [False, False, True]
    assert not log.is_complete_at(Position(3))
    put(tmp_path, small(0, 1, 2, mark="b"))
    assert not log.is_complete_at(rows[-1].position)
    put(tmp_path, small(0))
    assert not log.is_complete_at(rows[-1].position)


def test_files_of_both_layouts(tmp_path: Path) -> None:
    """The kinds asked for, sorted by path, with versions that change with the content."""
    flat = RunLog(LocalStorage(flat_log(tmp_path / "flat")))
    assert [file.path for file in flat.files(frozenset({"config", "checkpoints"}))] == [
        "checkpoints.jsonl",
        "config.json",
    ]
    assert [file.path for file in flat.files(frozenset({"logtree"}))] == [
        "train_iteration_000000_logtree.json",
        "train_iteration_000008_logtree.json",
    ]
    nested = RunLog(LocalStorage(nested_log(tmp_path / "nested")))
    assert [file.path for file in nested.files(frozenset({"logtree"}))] == [
        f"iteration_{step:06d}/train_logtree.json" for step in (0, 8, 11)
    ]
    (config,) = nested.files(frozenset({"config"}))
    assert json.loads(config.read())["model"]["rank"] == 8
    (tmp_path / "nested/config.json").write_text("{}")
    (changed,) = nested.files(frozenset({"config"}))
    assert changed.version != config.version
    assert nested.files(frozenset()) == []


def test_a_metrics_file_of_another_name_is_rows_alone(tmp_path: Path) -> None:
    """No files, config or checkpoints of the folder it happens to lie in."""
    flat_log(tmp_path)
    put(tmp_path, small(0, 1), "other.jsonl")
    log = RunLog(LocalStorage(tmp_path), metrics="other.jsonl")
    assert [row.step for row in log.rows(START)] == [0, 1]
    assert log.files(frozenset({"config", "logtree"})) == []
    assert (log.info().config, log.info().status, log.info().time_source) == (None, "killed", "mtime")
