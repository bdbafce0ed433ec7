"""Who a log_path is, where it was made, moved and copied."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from runmirror.log import layout
from runmirror.log.identity import canonical_url, claim, identify, read_record
from runmirror.storage import LocalStorage


def make(folder: Path) -> LocalStorage:
    storage = LocalStorage(folder)
    claim(storage)
    return storage


def foreign(folder: Path, metrics: bytes = b'{"step":0}\n{"step":1}\n', config: bytes = b"{}") -> LocalStorage:
    storage = LocalStorage(folder)
    storage.write(layout.METRICS, metrics)
    storage.write(layout.CONFIG, config)
    return storage


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_claim_makes_an_identity_and_keeps_it(tmp_path: Path) -> None:
    """32 hex characters, with place, time and version; the same, and not a byte written, the second time."""
    storage = LocalStorage(tmp_path / "a")
    record = claim(storage)
    before = (tmp_path / "a/.runmirror/run.json").stat()
    assert len(record.run_id) == 32
    assert (record.url, record.version) == ((tmp_path / "a").as_uri(), "0.1.0")
    assert claim(storage) == record == read_record(storage)
    assert (tmp_path / "a/.runmirror/run.json").stat() == before


def test_a_reader_finds_the_writers_id(tmp_path: Path) -> None:
    """The claimed id, own, and nothing written."""
    storage = make(tmp_path / "a")
    before = tree(tmp_path)
    identity = identify(storage)
    record = read_record(storage)
    assert record is not None
    assert (identity.run_id, identity.own) == (record.run_id, True)
    assert tree(tmp_path) == before


def test_a_moved_log_keeps_its_id_and_notes_the_new_place(tmp_path: Path) -> None:
    """Same id for readers and writer; run.json names the new folder after the writer opened it."""
    run_id = identify(make(tmp_path / "a")).run_id
    (tmp_path / "a").rename(tmp_path / "b")
    moved = LocalStorage(tmp_path / "b")
    assert identify(moved).run_id == run_id
    record = claim(moved)
    assert (record.run_id, record.url) == (run_id, (tmp_path / "b").as_uri())


def test_a_copy_gets_an_id_of_its_own_which_reader_and_writer_agree_on(tmp_path: Path) -> None:
    """Another id while the original is there; the writer writes it down, with where it comes from."""
    original = make(tmp_path / "a")
    run_id = identify(original).run_id
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = LocalStorage(tmp_path / "b")
    read = identify(copy).run_id
    assert read != run_id
    assert identify(LocalStorage(tmp_path / "b")).run_id == read
    record = claim(copy)
    assert (record.run_id, record.url) == (read, (tmp_path / "b").as_uri())
    assert record.model_dump()["copied_from"] == run_id
    shutil.rmtree(tmp_path / "a")
    assert identify(copy).run_id == claim(copy).run_id == read


def test_two_copies_are_two(tmp_path: Path) -> None:
    """Three ids for an original and its two copies."""
    make(tmp_path / "a")
    for name in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / name)
    assert len({identify(LocalStorage(tmp_path / name)).run_id for name in "abc"}) == 3


def test_another_run_at_the_old_place_is_no_original(tmp_path: Path) -> None:
    """A log that moved, whose old folder holds a new run since, keeps its id."""
    run_id = identify(make(tmp_path / "a")).run_id
    (tmp_path / "a").rename(tmp_path / "b")
    make(tmp_path / "a")
    assert claim(LocalStorage(tmp_path / "b")).run_id == run_id


@pytest.mark.skipif(os.name == "nt", reason="symbolic links")
def test_a_symbolic_link_is_the_same_place(tmp_path: Path) -> None:
    """One id, not a copy, through the link and without it, for own and foreign logs."""
    run_id = identify(make(tmp_path / "a")).run_id
    (tmp_path / "link").symlink_to(tmp_path / "a")
    link = LocalStorage(tmp_path / "link")
    assert identify(link).run_id == claim(link).run_id == run_id
    foreign(tmp_path / "f")
    (tmp_path / "g").symlink_to(tmp_path / "f")
    assert identify(LocalStorage(tmp_path / "f")) == identify(LocalStorage(tmp_path / "g"))
    assert canonical_url(LocalStorage(tmp_path / "g")) == (tmp_path / "f").resolve().as_uri()


def test_a_foreign_log_is_known_by_its_place(tmp_path: Path) -> None:
    """32 hex characters, not own, different for equal content elsewhere, and nothing written."""
    one, other = foreign(tmp_path / "a"), foreign(tmp_path / "b")
    before = tree(tmp_path)
    assert identify(one).run_id != identify(other).run_id
    assert (len(identify(one).run_id), identify(one).own) == (32, False)
    assert tree(tmp_path) == before


def test_by_content_a_foreign_log_may_move_and_grow(tmp_path: Path) -> None:
    """The same id elsewhere and with more rows; another one with another first row or config."""
    run_id = identify(foreign(tmp_path / "a"), by_content=True).run_id
    same = foreign(tmp_path / "b", b'{"step":0}\n{"step":1}\n{"step":2}\n')
    assert identify(same, by_content=True).run_id == run_id
    assert identify(foreign(tmp_path / "c", b'{"step":5}\n'), by_content=True).run_id != run_id
    assert identify(foreign(tmp_path / "d", config=b"{ }"), by_content=True).run_id != run_id


def test_by_content_says_nothing_of_own_and_empty_logs(tmp_path: Path) -> None:
    """An own log keeps its id; two empty folders are two."""
    own = make(tmp_path / "a")
    assert identify(own, by_content=True) == identify(own)
    one, other = LocalStorage(tmp_path / "b"), LocalStorage(tmp_path / "c")
    assert identify(one, by_content=True).run_id != identify(other, by_content=True).run_id


@pytest.mark.parametrize("damage", [b"{", b"[]", b'{"run_id": 3}', b'{"run_id":"","url":"","created":0}', b"\x00" * 9])
def test_a_damaged_record_is_kept_aside_and_replaced(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers see a foreign log; the writer warns, keeps the bytes and makes a new identity."""
    storage = LocalStorage(tmp_path / "a")
    storage.write(layout.RUN, damage)
    assert identify(storage).own is False
    with caplog.at_level(logging.WARNING, "runmirror"):
        record = claim(storage)
    assert identify(storage) == identify(storage).model_copy(update={"run_id": record.run_id, "own": True})
    assert storage.read(f"{layout.RUN}.damaged") == damage
    assert "run.json.damaged" in caplog.text


def test_fields_of_a_newer_version_survive(tmp_path: Path) -> None:
    """An unknown field is still there after the log moved and was claimed."""
    storage = make(tmp_path / "a")
    record = json.loads(storage.read(layout.RUN)) | {"team": "rl"}
    storage.write(layout.RUN, json.dumps(record).encode())
    (tmp_path / "a").rename(tmp_path / "b")
    assert claim(LocalStorage(tmp_path / "b")).model_dump()["team"] == "rl"
