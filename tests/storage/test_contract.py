"""The contract of every Storage, on a folder and on every kind of store there is a server for."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runmirror.storage import CloudStorage, LocalStorage, Storage, storage_from_uri, upload
from tests.servers.clouds import BUCKET, fake_gcs_server, s3_server
from tests.servers.gcs import gcs_server

KINDS = [
    "local",
    "memory",
    "gcs",
    pytest.param("gcs with faults", marks=pytest.mark.slow),
    pytest.param("fake-gcs-server", marks=pytest.mark.slow),
    pytest.param("s3", marks=pytest.mark.slow),
]
ODD = [
    "ünï/cödé 日本.jsonl",
    "x[1].json",
    "q?.json",
    "a*b.html",
    "with space+plus%20.txt",
    "#hash;semi&amp=.txt",
    "{}.json",
]


class Place:
    """A root on one kind of store."""

    def __init__(self, uri: str, options: dict[str, Any]) -> None:
        self.uri, self.options = uri, options

    def open(self) -> Storage:
        return storage_from_uri(self.uri, **self.options)

    def stored(self) -> Storage:
        """What anyone sees, past the spool."""
        return CloudStorage(self.uri, self.options, local=False) if "://" in self.uri else self.open()


@pytest.fixture(scope="module", params=KINDS)
def roots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Place]]:
    kind: str = request.param
    with contextlib.ExitStack() as stack:
        if kind != "gcs with faults":  # it alone limits how often an object is written
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(upload, "GAP", 0.0)
        options: dict[str, Any] = {}
        scheme = "gs" if "gcs" in kind else kind
        if kind in ("gcs", "gcs with faults"):
            server = stack.enter_context(gcs_server())
            server.faults.one_per_second = kind != "gcs"
            server.faults.error_rate = server.faults.lost_rate = 0.04 if kind != "gcs" else 0.0
            options = server.options
        elif kind == "fake-gcs-server":
            options = stack.enter_context(fake_gcs_server())
        elif kind == "s3":
            options = stack.enter_context(s3_server())
        folder = tmp_path_factory.mktemp("roots")

        def make() -> Place:
            name = f"run-{secrets.token_hex(4)}"
            return Place(str(folder / name) if kind == "local" else f"{scheme}://{BUCKET}/exp/{name}", options)

        yield make


@pytest.fixture
def place(roots: Callable[[], Place]) -> Place:
    return roots()


def test_what_was_appended_is_there_exactly(place: Place) -> None:
    """All pieces in order, for the writer at once, for everyone after close."""
    pieces = [os.urandom(n % 977) + b"\n" for n in range(0, 3000, 37)]
    with place.open() as storage:
        for piece in pieces:
            storage.append("deep/er/m.jsonl", piece)
        assert storage.read("deep/er/m.jsonl") == b"".join(pieces)
    with place.stored() as found:
        assert found.read("deep/er/m.jsonl") == b"".join(pieces)


def test_a_second_writer_appends_behind_the_first(place: Place) -> None:
    """One file, both rows, though the second writer has read nothing."""
    for line in (b"one\n", b"two\n", b"three\n"):
        with place.open() as storage:
            storage.append("m.jsonl", line)
    with place.stored() as found:
        assert found.read("m.jsonl") == b"one\ntwo\nthree\n"


def test_whole_files_are_replaced(place: Place) -> None:
    """The last content, whichever way the earlier one was made."""
    with place.open() as storage:
        storage.write("a.json", b"old, and longer than the new one")
        storage.write("a.json", b"new")
        storage.append("grown", b"1")
        storage.write("grown", b"whole")
        storage.append("grown", b" and more")
        storage.write("then grown", b"whole")
        storage.append("then grown", b" and more")
        storage.write("empty", b"")
        for _ in range(2):
            read = {name: storage.read(name) for name in storage.list_dir("") if name != ".runmirror"}
            assert read == {
                "a.json": b"new", "grown": b"whole and more", "then grown": b"whole and more", "empty": b""
            }  # fmt: skip
            storage.flush()
    with place.stored() as found:
        assert {name: found.read(name) for name in read} == read


def test_ranges_end_where_the_file_does(place: Place) -> None:
    """b"" at and past the end, the rest before it; FileNotFoundError for a missing file."""
    with place.open() as storage:
        storage.append("m", b"0123456789")
        storage.flush()
        with place.stored() as found:
            for one in (storage, found):
                assert one.read_range("m", 0) == b"0123456789"
                assert one.read_range("m", 3, 4) == b"3456"
                assert one.read_range("m", 8, 100) == b"89"
                assert one.read_range("m", 9) == b"9"
                assert [one.read_range("m", at, n) for at in (10, 11, 99) for n in (None, 1, 5)] == [b""] * 9
                assert one.read_range("m", 4, 0) == b""
                for missing in (lambda one=one: one.read("none"), lambda one=one: one.read_range("none", 0, 1)):
                    with pytest.raises(FileNotFoundError):
                        missing()


def test_names_are_exact(place: Place) -> None:
    """Unicode, and characters that are patterns elsewhere: each file has its own content, and is removed alone."""
    decoys = ["x1.json", "qa.json", "ab.html", "axb.html"]
    with place.open() as storage:
        for name in [*ODD, *decoys]:
            storage.write(name, name.encode())
        storage.append("*.jsonl", b"{}\n")
        storage.flush()
        with place.stored() as found:
            for name in ODD:
                assert (storage.read(name), found.read(name)) == (name.encode(),) * 2
                assert found.read_range(name, 1, 2) == name.encode()[1:3]
                assert (stat := found.stat(name)) is not None
                assert stat.size == len(name.encode())
        for name in ODD:
            storage.remove(name)
    with place.stored() as found:
        names = {entry.path for entry in found.scan() if not entry.path.startswith(".runmirror/")}
        assert names == {*decoys, "*.jsonl"}


@pytest.mark.parametrize("path", ["/abs", "../up", "a/../b", "a//b", "a/./b", "a\\b", "nul\0", "line\n", "end/"])
def test_paths_stay_below_the_root(place: Place, path: str) -> None:
    """ValueError, before anything is asked or written."""
    storage = place.open()
    calls: list[Callable[[], object]] = [
        lambda: storage.read(path),
        lambda: storage.read_range(path, 0, 1),
        lambda: storage.write(path, b""),
        lambda: storage.append(path, b""),
        lambda: storage.stat(path),
        lambda: storage.exists(path),
        lambda: storage.list_dir(path),
        lambda: list(storage.scan(path)),
        lambda: storage.remove(path),
        lambda: storage.url(path),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="relative path"):
            call()
    storage.close()


def test_listings_know_sizes_and_versions(place: Place) -> None:
    """Names directly below, files in depth in one listing; another version after another content."""
    with place.open() as storage:
        for name in ("a.json", "it/1/b.html", "it/2/b.html", "item.txt"):
            storage.write(name, name.encode())
        storage.append("it/m.jsonl", b"{}\n")
        storage.flush()
        with place.stored() as found:
            for one in (storage, found):
                assert set(one.list_dir("")) - {".runmirror"} == {"a.json", "it", "item.txt"}
                assert one.list_dir("it") == ["1", "2", "m.jsonl"]
                assert one.list_dir("nowhere") == []
                assert list(one.scan("nowhere")) == []
                entries = {entry.path: entry.stat for entry in one.scan("it")}
                assert list(entries) == ["it/1/b.html", "it/2/b.html", "it/m.jsonl"]
                assert [stat.size for stat in entries.values()] == [11, 11, 3]
                assert all(abs(time.time() - stat.mtime) < 300 for stat in entries.values())
                assert entries["it/1/b.html"] == one.stat("it/1/b.html")
                assert one.exists("a.json")
                assert not one.exists("b.json")
                assert one.stat("b.json") is None
            before = found.stat("a.json")
            storage.write("a.json", b"A.json")
            storage.flush()
            after = found.stat("a.json")
            assert before is not None
            assert after is not None
            assert before.version != after.version


def test_what_is_removed_is_gone(place: Place) -> None:
    """Also what still waited to be uploaded; a missing file is no error; a name can come again."""
    with place.open() as storage:
        storage.write("a", b"1")
        storage.append("b", b"1")
        storage.flush()
        storage.write("c", b"1")
        for name in ("a", "b", "c", "never there"):
            storage.remove(name)
            assert not storage.exists(name)
        storage.append("b", b"2")
        storage.remove_dir("a")
    with place.stored() as found:
        assert [name for name in found.list_dir("") if name != ".runmirror"] == ["b"]
        assert found.read("b") == b"2"


def test_a_pickled_copy_reads_the_same(place: Place) -> None:
    """Before and after the upload; options travel along."""
    with place.open() as storage:
        storage.append("m", b"one")
        with pickle.loads(pickle.dumps(storage)) as copy:
            assert copy.read("m") == b"one"
            storage.flush()
            assert copy.read("m") == b"one"
            assert copy.url("m") == storage.url("m")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_reads_and_the_parent_writes_on(place: Place) -> None:
    """The child sees what is there; the parent's file has the rows of before and after."""
    with place.open() as storage:
        storage.append("m", b"1\n")
        storage.write("w", b"whole")
        storage.flush()
        storage.append("m", b"2\n")
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a child that hangs ends
            good = storage.read("m") == b"1\n2\n" and (storage.read("w") == b"whole" or place.uri.startswith("memory"))
            os._exit(0 if good else 3)
        assert os.waitpid(child, 0)[1] == 0
        storage.append("m", b"3\n")
    with place.stored() as found:
        assert found.read("m") == b"1\n2\n3\n"


def test_large_files_arrive_whole(place: Place) -> None:
    """3 MB at once, and 300 KB pieces behind a large head."""
    large = os.urandom(3 << 20)
    pieces = [os.urandom(300 << 10) for _ in range(3)]
    with place.open() as storage:
        storage.write("large", large)
        for piece in pieces:
            storage.append("grown", piece)
            storage.flush()
    with place.stored() as found:
        assert found.read("large") == large
        assert found.read("grown") == b"".join(pieces)


def test_a_storage_can_be_used_again_after_close(place: Place) -> None:
    """close, then append: both rows."""
    storage = place.open()
    storage.append("m", b"1\n")
    storage.close()
    storage.append("m", b"2\n")
    storage.close()
    with place.stored() as found:
        assert found.read("m") == b"1\n2\n"


def test_the_protocol_is_complete(place: Place) -> None:
    """Every kind is a Storage."""
    assert isinstance(place.open(), Storage)
    assert isinstance(place.open(), (LocalStorage, CloudStorage))
    assert Path(place.open().url("a/b")).name == "b"
