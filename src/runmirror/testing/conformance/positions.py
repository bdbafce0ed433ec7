"""Attributes, positions, files and the end of a run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from runmirror.exceptions import OptionError
from runmirror.log.records import Status
from runmirror.sinks.base import Capabilities, ReadsBack, Sink, SinkOptions
from runmirror.sinks.registry import check_options
from runmirror.testing.conformance.base import BEGAN, DEADLINE, FILES, Harness, a_file, a_run, lose, rows


class PositionTests(Harness):
    """Attributes, positions, files and the end of a run."""

    # -- the contract as data

    def test_is_a_sink(self, tmp_path: Path) -> None:
        """Every verb and attribute of the protocol, of the right type."""
        sink = self.make_sink(tmp_path)
        assert isinstance(sink, Sink)
        assert isinstance(sink.name, str)
        assert re.fullmatch(r"[a-z][a-z0-9_-]*", sink.name), f"a name for the command line, not {sink.name!r}"
        assert isinstance(sink.capabilities, Capabilities)
        assert sink.capabilities.max_rows >= 1
        assert sink.capabilities.default_records <= sink.capabilities.records
        assert issubclass(sink.Options, SinkOptions)

    def test_options_are_described_and_checked(self, tmp_path: Path) -> None:
        """Each option has a description; an unknown one is an OptionError that names those there are."""
        model = self.make_sink(tmp_path).Options
        assert [name for name, option in model.model_fields.items() if not option.description] == []
        told = ""
        try:
            check_options("it", model, {"no_such_option": 1})
        except OptionError as error:
            told = str(error)
        assert "no_such_option" in told
        assert "include" in told

    def test_destination_is_stable_and_holds_no_credentials(self, tmp_path: Path) -> None:
        """One text for one place, before and after opening, without a password, token or user in it."""
        sink = self.make_sink(tmp_path)
        before = sink.destination()
        sink.open(a_run(), None)
        assert (before, before) == (sink.destination(), self.make_sink(tmp_path).destination())
        assert not re.search(r"://[^/]*@|password|secret|token=|api_?key", before, re.IGNORECASE), before
        sink.close(None, DEADLINE)

    def test_making_one_touches_nothing(self, tmp_path: Path) -> None:
        """No file appears before ``open``."""
        self.make_sink(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        self.make_sink(tmp_path).destination()
        assert sorted(tmp_path.rglob("*")) == before

    # -- positions

    def test_a_new_run_is_empty(self, tmp_path: Path) -> None:
        """Position 0 or none told, a place for people, nothing shown; the same when opened again."""
        sink = self.make_sink(tmp_path)
        first = sink.open(a_run(), None)
        sink.close(None, DEADLINE)
        again = sink.open(a_run(), first.tracker_run_id)
        assert (first.position or 0, again.position or 0) == (0, 0)
        assert first.url
        assert (again.url, again.tracker_run_id) == (first.url, first.tracker_run_id)
        sink.close(None, DEADLINE)
        assert self.read(sink, a_run()) == []
        assert not isinstance(sink, ReadsBack) or sink.read_back(a_run("another"), None) is None

    def test_put_nothing(self, tmp_path: Path) -> None:
        """An empty batch is taken, before and after others, and changes no position."""
        sink = self.make_sink(tmp_path)
        sink.open(a_run(), None)
        assert list(sink.put([])) == []
        assert sink.flush(DEADLINE) == 0
        sink.put(rows(2))
        assert list(sink.put([])) == []
        assert sink.flush(DEADLINE) <= 2
        sink.close(None, DEADLINE)

    def test_flush_never_goes_back_and_never_tells_too_much(self, tmp_path: Path) -> None:
        """At most what was put, at least what was told before, and all of it in the end."""
        sink = self.make_sink(tmp_path)
        sink.open(a_run(), None)
        told, every = 0, rows(20)
        for start in range(0, 20, 4):
            sink.put(every[start : start + 4])
            now = sink.flush(DEADLINE)
            assert told <= now <= start + 4
            told = now
        for _ in range(5):
            told = sink.flush(DEADLINE)
        assert told == 20
        sink.close(None, DEADLINE)
        self.holds(sink, every)

    def test_rows_without_values_count(self, tmp_path: Path) -> None:
        """Broken, refused and emptied rows keep the ordinals dense: the position is the ordinal, not the points."""
        every = [one.emptied("a broken line") if one.ordinal % 3 else one for one in rows(9)]
        self.deliver(tmp_path, every[:5])
        sink = self.make_sink(tmp_path)
        opened = sink.open(a_run(), None)
        assert opened.position in (5, None)
        sink.put(every[opened.position or 0 :])
        assert sink.flush(DEADLINE) == 9
        sink.close(None, DEADLINE)
        self.holds(sink, every)

    def test_the_largest_batch_is_taken(self, tmp_path: Path) -> None:
        """``capabilities.max_rows`` rows (at most 2,000 are tried here) in one put."""
        count = min(self.make_sink(tmp_path).capabilities.max_rows, 2000)
        self.holds(self.deliver(tmp_path, rows(count)), rows(count))

    def test_goes_on_after_a_close(self, tmp_path: Path) -> None:
        """Closed and opened after every few rows, with and without the tracker's id known: each row once."""
        every, known = rows(10), None
        for end in (2, 3, 7, 10):
            sink = self.make_sink(tmp_path)
            opened = sink.open(a_run(), known if end % 2 else None)
            known = opened.tracker_run_id
            sink.put(every[opened.position or 0 : end])
            assert sink.flush(DEADLINE) == end
            sink.close(None, DEADLINE)
        self.holds(self.make_sink(tmp_path), every)

    def test_goes_on_after_a_crash(self, tmp_path: Path) -> None:
        """The object is lost without close, after a flush or before it: what ``open`` tells is at least what was flushed
        and at most what was put, and going on from there doubles nothing."""
        every, flushed = rows(12), 0
        for end in (3, 4, 8, 12):
            sink = self.make_sink(tmp_path)
            opened = sink.open(a_run(), None)
            assert opened.position is None or flushed <= opened.position <= end
            start = flushed if opened.position is None else opened.position
            sink.put(every[start:end])
            if end % 2 == 0:
                flushed = sink.flush(DEADLINE)
            lose(sink)
            del sink
        last = self.make_sink(tmp_path)
        opened = last.open(a_run(), None)
        last.put(every[flushed if opened.position is None else opened.position :])
        assert last.flush(DEADLINE) == 12
        last.close(None, DEADLINE)
        self.holds(last, every)

    # -- files and the end

    def test_files_are_sent_once_per_version(self, tmp_path: Path) -> None:
        """The same file twice is one, and a changed one takes its place, for each kind it can show."""
        sink = self.make_sink(tmp_path)
        sink.open(a_run(), None)
        sink.put(rows(2))
        expected: dict[str, bytes] = {}
        for version in (b'{"name": "1"}\n', b'{"name": "1"}\n', b'{"name": "1"}\n{"name": "2"}\n'):
            for path, kind in FILES.items():
                if kind in sink.capabilities.records:
                    sink.put_file(a_file(path, kind, version))
                    expected[path] = version
        assert sink.flush(DEADLINE) == 2
        sink.close(None, DEADLINE)
        found = self.read_files(sink, a_run())
        assert found is None or found == expected
        self.holds(sink, rows(2))

    def test_every_end_is_taken(self, tmp_path: Path) -> None:
        """finished, failed and killed, told twice, and known or only inferred: no error, no point more."""
        ends: tuple[Status, ...] = ("finished", "failed", "killed")
        for status in ends:
            for known in (True, False):
                run = replace(a_run(f"{status}-{known}"), status=status, end=BEGAN + 100, status_known=known)
                for _ in range(2):
                    sink = self.make_sink(tmp_path)
                    opened = sink.open(run, None)
                    sink.put(rows(3)[opened.position or 0 :])
                    sink.flush(DEADLINE)
                    sink.close(run, DEADLINE)
                self.holds(self.make_sink(tmp_path), rows(3), run)

    def test_letting_go_twice_is_no_error(self, tmp_path: Path) -> None:
        """``close(None)`` before ``open``, after it, and again."""
        sink = self.make_sink(tmp_path)
        sink.close(None, DEADLINE)
        sink.open(a_run(), None)
        sink.close(None, DEADLINE)
        sink.close(None, DEADLINE)

    def test_an_ended_run_can_go_on(self, tmp_path: Path) -> None:
        """Rows that come after the end was told, as in a resumed run, arrive."""
        ended = replace(a_run(), status="finished", end=BEGAN + 4)
        self.deliver(tmp_path, rows(4), end=ended)
        sink = self.make_sink(tmp_path)
        opened = sink.open(a_run(), None)
        sink.put(rows(8)[opened.position or 0 :])
        assert sink.flush(DEADLINE) == 8
        sink.close(replace(ended, end=BEGAN + 8), DEADLINE)
        self.holds(sink, rows(8))
