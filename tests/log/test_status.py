"""How a run is, and the small files that tell it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from runmirror.log.records import Checkpoint, JournalEntry
from runmirror.log.status import (
    SILENT_AFTER,
    latest_values,
    line_before,
    read_checkpoints,
    read_config,
    read_journal,
    read_resumes,
    run_status,
)
from runmirror.storage import LocalStorage

OLD = 1_700_000_000.0


def entry(event: str, status: str | None = None, when: float = OLD) -> JournalEntry:
    return JournalEntry.model_validate({"event": event, "time": when, "status": status})


def checkpoint(**fields: Any) -> Checkpoint:
    return Checkpoint.model_validate({"name": "000004"} | fields)


@pytest.mark.parametrize("status", ["finished", "failed", "killed"])
def test_the_journal_says_how_a_run_ended(status: str) -> None:
    """Its own word, whatever the log looks like."""
    journal = [entry("started"), entry("finished", status)]
    assert run_status(journal, [], {"progress/done_frac": 0.5}, time.time()) == (status, True)


def test_a_finish_without_status_is_finished() -> None:
    """finished."""
    assert run_status([entry("finished")], [], {}, OLD) == ("finished", True)


def test_a_resumed_run_is_no_longer_finished() -> None:
    """Running while it writes, killed (not known) once it is silent; a final checkpoint of before says nothing."""
    journal = [entry("started"), entry("finished", "finished"), entry("resumed")]
    final = [checkpoint(final=True)]
    assert run_status(journal, final, {}, time.time() - 5) == ("running", True)
    assert run_status(journal, final, {"progress/done_frac": 1.0}, OLD) == ("killed", False)


def test_a_run_that_just_started_is_running() -> None:
    """The journal is a sign of life before there is a row."""
    assert run_status([entry("started", when=time.time())], [], {}, None) == ("running", True)


@pytest.mark.parametrize("fields", [{"final": True}, {"name": "final"}])
def test_a_final_checkpoint_ends_a_foreign_run(fields: dict[str, Any]) -> None:
    """finished, even when it was written a moment ago."""
    assert run_status([], [checkpoint(), checkpoint(**fields)], {}, time.time()) == ("finished", True)


def test_a_checkpoint_after_the_final_one_takes_it_back() -> None:
    """The run went on: running, or killed when silent."""
    saved = [checkpoint(final=True), checkpoint()]
    assert run_status([], saved, {}, time.time()) == ("running", True)
    assert run_status([], saved, {}, OLD) == ("killed", False)


@pytest.mark.parametrize(("done", "status"), [(1.0, "finished"), (1, "finished"), (0.99, "killed"), ("1", "killed")])
def test_a_foreign_run_that_is_all_done_is_finished(done: Any, status: str) -> None:
    """progress/done_frac of at least 1, as a number."""
    assert run_status([], [], {"progress/done_frac": done}, OLD)[0] == status


def test_silence_decides_else() -> None:
    """Running within 15 minutes of the last write, then killed and not known; a log without rows counts as silent."""
    now = time.time()
    assert run_status([], [], {}, now - SILENT_AFTER + 60) == ("running", True)
    assert run_status([], [], {}, now - SILENT_AFTER - 60) == ("killed", False)
    assert run_status([], [], {}, None) == ("killed", False)


def test_broken_lines_of_small_files_are_left_out(tmp_path: Path) -> None:
    """The good lines in order; fields that are not known are kept."""
    (tmp_path / ".runmirror").mkdir()
    (tmp_path / ".runmirror/journal.jsonl").write_text(
        '{"event":"started","time":1}\n\nnot json\n{"event":"unheard of","time":2}\n[1]\n'
        '{"event":"resumed","time":3,"offset":7,"new":"field"}\n{"event":"fini'
    )
    (tmp_path / "checkpoints.jsonl").write_text('{"name":"a","batch":1,"loop":2}\n{"batch":2}\n{"name":"b"}')
    storage = LocalStorage(tmp_path)
    journal = read_journal(storage)
    assert [(line.event, line.offset) for line in journal] == [("started", 0), ("resumed", 7)]
    assert journal[1].model_extra == {"new": "field"}
    assert [(saved.name, saved.loop_state) for saved in read_checkpoints(storage)] == [("a", {"loop": 2}), ("b", {})]


def test_missing_files_are_empty(tmp_path: Path) -> None:
    """[] and None."""
    storage = LocalStorage(tmp_path / "nowhere")
    assert (read_journal(storage), read_checkpoints(storage), read_config(storage)) == ([], [], None)
    assert latest_values(storage, "metrics.jsonl") == {}


@pytest.mark.parametrize(
    ("text", "config"), [('{\n  "a": NaN\n}', True), ("[1]", False), ("", False), ('{"a":', False)]
)
def test_a_config_is_an_object_or_nothing(tmp_path: Path, text: str, config: bool) -> None:
    """Its content, indented or with bare NaN tokens; None when it is none."""
    (tmp_path / "config.json").write_text(text)
    assert (read_config(LocalStorage(tmp_path)) is not None) is config


def test_the_line_before_a_byte(tmp_path: Path) -> None:
    """The whole line that ends there, however long, without its newline."""
    long = b"x" * 100_000
    (tmp_path / "m").write_bytes(b"first\n" + long + b"\nlast")
    storage = LocalStorage(tmp_path)
    end = 6 + len(long) + 1
    assert line_before(storage, "m", 6) == b"first"
    assert line_before(storage, "m", end) == line_before(storage, "m", end - 1) == long
    assert line_before(storage, "m", end + 4) == b"last"
    assert line_before(storage, "m", 0) == b""


def test_the_last_word_on_every_key(tmp_path: Path) -> None:
    """Later rows win; a final row of token counts does not hide how far the run was; a torn line says nothing."""
    (tmp_path / "m").write_text('{"step":3,"done":0.5}\n{"step":4,"done":1.0}\n{"step":4,"cost":9}\n{"done":0.')
    assert latest_values(LocalStorage(tmp_path), "m") == {"step": 4, "done": 1.0, "cost": 9}


def test_the_last_word_of_a_very_long_row(tmp_path: Path) -> None:
    """Read whole, with and without its newline."""
    for newline in ("", "\n"):
        (tmp_path / "m").write_text('{"step":3}\n{"step":4,"text":"' + "x" * 100_000 + '"}' + newline)
        assert latest_values(LocalStorage(tmp_path), "m")["step"] == 4


def test_configs_of_resumes_come_from_the_log_path_alone(tmp_path: Path) -> None:
    """One that a link fetches from elsewhere, and a journal's path that leads out, are left out; the others are read."""
    (tmp_path / "private.json").write_text('{"word": "private"}')
    for number in (1, 2):
        (tmp_path / f"run/.runmirror/resume_{number}").mkdir(parents=True)
    (tmp_path / "run/.runmirror/resume_1/config.json").symlink_to(tmp_path / "private.json")
    (tmp_path / "run/.runmirror/resume_2/config.json").write_text('{"lr": 0.5}')
    wrote = [".runmirror/resume_1/config.json", "../run/config.json", ".runmirror/resume_2/config.json"]
    resumed = JournalEntry.model_validate({"event": "resumed", "time": OLD, "wrote": wrote})
    assert read_resumes(LocalStorage(tmp_path / "run"), [resumed]) == ({"lr": 0.5},)
