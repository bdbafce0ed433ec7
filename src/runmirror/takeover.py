"""Runs that another machine took over: the numbering of rows stays unique.

A mirror on the writer's machine reads rows before they are uploaded. When another machine goes on from what was uploaded, the
trackers may hold rows that never reached the log: they are orphaned. Their ordinals must not be given to the rows that
came instead, or those would be taken for delivered.

Guarantees: rows of a later start never get an ordinal that a tracker holds from an earlier one, as far as the journal, the
state (or its copy in the log_path) and the tracker tell. All machines number alike, for the state carries the stretches.
"""

from __future__ import annotations

import logging

from runmirror.log.rows import START
from runmirror.log.runlog import CUT, RunLog
from runmirror.log.status import read_journal
from runmirror.state import StateRecord, known_states

SLACK = 100
"""Ordinals left free for another tracker that may hold a little more than its state says."""
log = logging.getLogger("runmirror")


def adopt(source: RunLog, record: StateRecord) -> None:
    """Number the rows as the machine did that wrote this state."""
    index = source.index
    if index is not None and record.stretches and record.stretches[-1][1] > index.starts[-1][1]:
        index.adopt(record.stretches)


def settle(source: RunLog, record: StateRecord, starts: int, held: int) -> int:
    """After the run was started again: leave out the ordinals of rows that the tracker holds and the log never got.

    Args:
        source: the run.
        record: the state, as of the start it was last saved in.
        starts: starts and resumes in the journal now.
        held: rows that the tracker holds.

    Returns:
        How many rows are orphaned.
    """
    index = source.index
    begun = [entry.offset for entry in read_journal(source.storage) if entry.event != "finished"]
    orphaned = 0
    if index is not None and 0 < record.starts < min(starts, len(begun) + 1):
        lines, end = 0, 0
        for row in source.rows(START):
            if row.fault != CUT:
                if row.end > begun[record.starts]:
                    break
                lines += 1
            end = row.ordinal + 1
        orphaned = max(0, held - end)
        if orphaned:
            states = [state for _, state in known_states(source.storage, source.identity)]
            others = [state for state in states if isinstance(state, StateRecord) and state.ordinal]
            slack = SLACK if len(others) > 1 else 0
            index.skip(lines, max(held, *(state.ordinal for state in others), 0) + slack)
            log.warning(
                "%s: %d rows that the tracker holds never reached the log, for another machine took the run over before "
                "they were uploaded; what came after them is sent behind them", source.storage.url(), orphaned
            )  # fmt: skip
    note(source, record)
    record.starts = starts
    return orphaned


def note(source: RunLog, record: StateRecord) -> None:
    """Keep in the state how the rows are numbered."""
    if source.index is not None:
        record.stretches = list(source.index.starts) if len(source.index.starts) > 1 else []
