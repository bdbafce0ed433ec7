"""How far the mirrors of a run got, told from its log and the state files on this machine, without asking a tracker;
and how cursor and line index stay of one mind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from runmirror.exceptions import Refused, Retry, StateError
from runmirror.log.identity import identify
from runmirror.log.masking import mask_text, mask_url
from runmirror.log.records import Status
from runmirror.log.rows import Position, digest
from runmirror.log.runlog import RunLog
from runmirror.log.sources import Source
from runmirror.log.status import line_before
from runmirror.state import StateRecord, known_states


@dataclass(frozen=True, slots=True)
class SinkState:
    """How far the mirror to one destination got, by its state file. ``rows`` is the cursor: rows that are in the tracker.
    ``behind`` counts the rows above it, None when the log was changed below the cursor, so that only the next mirror can
    tell. ``closed`` is the status the tracker's run ended with."""

    sink: str
    destination: str
    url: str | None = None
    rows: int = 0
    behind: int | None = None
    rejected: int = 0
    files: int = 0
    closed: Status | None = None
    last_error: str | None = None
    updated: float | None = None


def unchanged(source: RunLog, position: Position) -> bool:
    """Whether a log still holds what was read of it up to ``position``."""
    stat = source.storage.stat(source.metrics)
    if stat is None or not 0 <= position.offset <= stat.size:
        return False
    return digest(line_before(source.storage, source.metrics, position.offset)) == position.digest


def outlive_cut(source: RunLog, cursor: Position) -> None:
    """A machine went down, and log and index lost their ends, the cursor did not: what stands there now is numbered above."""
    index, here = source.index, source.state_in is None  # a log in a cloud may only not be uploaded so far
    if (
        index is not None
        and here
        and cursor.offset > 0
        and len(index) < cursor.ordinal
        and not unchanged(source, cursor)
    ):
        index.fill(cursor.ordinal)


def sync_index(source: Source) -> None:
    """Before a cursor is saved: have what numbers its rows on the disk."""
    if isinstance(source, RunLog) and source.index is not None:
        source.index.sync()


def sink_states(source: RunLog, ends: Sequence[int]) -> list[SinkState]:
    """Every destination of a run that a mirror on this machine knows; ``ends`` are the byte offsets behind its lines."""
    identities = [source.identity]
    if not source.identity.own:  # an archive that was imported with --identity content
        identities.append(identify(source.storage, metrics=source.metrics, by_content=True))
    unique = {one.run_id: one for one in identities}
    known = [pair for one in unique.values() for pair in known_states(source.storage, one)]
    return [_sink_state(source, ends, sink, state) for sink, state in known]


def _sink_state(source: RunLog, ends: Sequence[int], sink: str, state: StateRecord | StateError) -> SinkState:
    if isinstance(state, StateError):
        return SinkState(sink, "", last_error=mask_text(str(state)))
    return SinkState(
        sink=sink,
        destination=mask_url(state.destination),
        url=mask_url(state.url) if state.url else None,
        rows=state.ordinal,
        behind=_behind(source, ends, state.position),
        rejected=state.rejected,
        files=len(state.files),
        closed=state.closed,
        last_error=mask_text(state.last_error) if state.last_error else None,
        updated=state.updated or None,
    )


def _behind(source: RunLog, ends: Sequence[int], position: Position) -> int | None:
    if position.offset < 0 or not position.ordinal:
        return max(0, len(ends) - position.ordinal)
    if not unchanged(source, position):
        return None
    done = bisect_right(ends, position.offset)
    late = done < min(position.ordinal, len(ends)) and ends[done] - position.offset <= len("\r\n")
    return len(ends) - done - late


def check_same_log(rows: int, held: int, url: str | None, *, uploading: bool) -> None:
    """Refuse to go on when the tracker holds more rows than the log ever had, as far as we know: then it is another log in
    the same place, and its first rows would be taken for delivered.

    Args:
        rows: that the log has, or had.
        held: rows that the tracker tells.
        url: of the tracker's run.
        uploading: whether the log's last rows may still be on another machine.
    """
    if rows < held and uploading:
        raise Retry(
            f"the tracker holds {held} rows of this run, and only {rows} are uploaded yet: a mirror on the writer's machine is "
            "ahead of this one"
        )
    if rows < held:
        raise Refused(
            f"{url}: the tracker holds {held} rows of this run, but the log has only {rows}, and there is no state that tells "
            "why: the log was replaced. Remove the tracker's run to have it mirrored anew"
        )
