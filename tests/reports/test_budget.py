"""Which reports a tracker gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runmirror.log.layout import Kind, file_name
from runmirror.log.sources import LogFile
from runmirror.reports.budget import within_budget


def file(kind: Kind, iteration: int, size: int = 10, split: str = "train") -> LogFile:
    return LogFile(file_name(kind, split, iteration), kind, "1", lambda: b"", size)


def pair(iteration: int, split: str = "train", size: int = 10) -> list[LogFile]:
    kinds: tuple[Kind, ...] = ("report", "logtree", "rollouts")
    return [file(kind, iteration, size, split) for kind in kinds]


def iterations(files: list[LogFile]) -> list[int]:
    return sorted({int(one.path.split("_iteration_")[1][:6]) for one in files if "_iteration_" in one.path})


def every(count: int) -> list[LogFile]:
    return [one for iteration in range(count) for one in pair(iteration)]


def test_a_short_run_is_sent_whole_when_it_has_ended() -> None:
    """20 pairs fit."""
    assert within_budget(every(20), {}, ended=True) == every(20)


def test_while_a_run_goes_on_there_is_room_for_what_comes() -> None:
    """The first four, then at growing distances."""
    assert iterations(within_budget(every(100), {}, ended=False)) == [0, 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93]
    assert len(iterations(within_budget(every(5000), {}, ended=False))) == 20


def test_the_end_spreads_what_is_left() -> None:
    """Evenly over all, first and last included; with some sent before, over the rest of them."""
    assert iterations(within_budget(every(191), {}, ended=True)) == list(range(0, 191, 10))
    sent = {one.path for one in every(100) if iterations([one])[0] in (0, 1, 2, 3, 5, 8, 12, 18)}
    found = iterations(within_budget(every(100), sent, ended=True))
    assert len(found) == 20
    assert {0, 1, 2, 3, 5, 8, 12, 18, 99} <= set(found)


def test_what_was_sent_is_sent_again() -> None:
    """Also when it would not be chosen now, and before others when bytes are short."""
    files = [*every(60)]
    sent = {file("report", 50).path}
    found = within_budget(files, sent, ended=False, most_bytes=50)
    assert iterations(found) == [0, 50]
    assert [one.kind for one in found if iterations([one]) == [50]] == ["report", "logtree", "rollouts"]


def test_bytes_are_counted() -> None:
    """A file that is too large is passed over; smaller ones behind it still go."""
    files = pair(0, size=60) + pair(1, size=30)
    found = within_budget(files, {}, ended=True, most_bytes=100)
    assert [(one.kind, one.size) for one in found] == [("report", 60), ("report", 30)]


def test_other_files_cost_nothing() -> None:
    """The configuration always goes, and kinds that are free for a sink."""
    config = LogFile("config.json", "config", "1", lambda: b"", 10**9)
    files = [config, *every(60)]
    found = within_budget(files, {}, ended=True, free={"rollouts"}, reports=1)
    assert config in found
    assert sum(one.kind == "rollouts" for one in found) == 60
    assert sum(one.kind == "report" for one in found) == 1


def test_evaluations_count_as_reports() -> None:
    """A pair is an iteration and a split."""
    files = [one for iteration in range(15) for split in ("train", "test") for one in pair(iteration, split)]
    found = within_budget(files, {}, ended=True)
    assert len({one.path.partition("_iteration_")[0] + str(iterations([one])) for one in found}) == 20


@given(
    st.integers(0, 300),
    st.integers(0, 25),
    st.integers(0, 5000),
    st.booleans(),
    st.sets(st.integers(0, 299), max_size=10),
)
def test_the_budget_holds(count: int, reports: int, most: int, ended: bool, had: set[int]) -> None:
    """Never more pairs than allowed (but those sent before), never more bytes; the answer is one of the files, in order."""
    files = every(count)
    sent = {one.path for one in files if iterations([one])[0] in had}
    found = within_budget(files, sent, ended=ended, reports=reports, most_bytes=most)
    assert [one for one in files if one in found] == found
    assert sum(one.size for one in found) <= most
    assert len(set(iterations(found)) - had) <= max(0, reports - len(had & set(range(count))))
