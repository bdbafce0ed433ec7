"""LocalStorage: the contract of every Storage, on a real folder."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.storage import LocalStorage, Storage, check_path, local_root, storage_from_uri
from runmirror.storage import local as module


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def test_is_a_storage(storage: LocalStorage) -> None:
    """LocalStorage has every method of the protocol."""
    assert isinstance(storage, Storage)


def test_nothing_is_made_before_the_first_write(storage: LocalStorage) -> None:
    """Looking at a root that isn't there finds nothing and makes nothing."""
    assert (storage.exists("a"), storage.stat("a"), storage.list_dir(""), list(storage.scan())) == (False, None, [], [])
    storage.remove("a")
    storage.remove_dir("b")
    assert not storage.root.exists()


def test_append_adds_at_the_end_and_is_seen_at_once(storage: LocalStorage) -> None:
    """Two appends are two pieces in order, visible to another reader without a flush."""
    storage.append("deep/er/m.jsonl", b"one\n")
    storage.append("deep/er/m.jsonl", b"two\n")
    assert (storage.root / "deep/er/m.jsonl").read_bytes() == b"one\ntwo\n"


def test_append_after_write_reaches_the_new_file(storage: LocalStorage) -> None:
    """ "new" + "more": a kept descriptor doesn't lead to the replaced file."""
    storage.append("a", b"old")
    storage.write("a", b"new ")
    storage.append("a", b"more")
    assert storage.read("a") == b"new more"


def test_append_after_remove_makes_the_file_again(storage: LocalStorage) -> None:
    """Only what was appended after the removal is there."""
    storage.append("a", b"old")
    storage.remove("a")
    storage.append("a", b"new")
    assert storage.read("a") == b"new"


def test_write_replaces_whole_files_and_leaves_no_temporary(storage: LocalStorage) -> None:
    """The new bytes, and nothing else in the folder."""
    storage.write("d/a.json", b"1")
    storage.write("d/a.json", b"22", content_type="application/json")
    assert (storage.read("d/a.json"), storage.list_dir("d")) == (b"22", ["a.json"])


def test_a_reader_never_sees_half_a_write(storage: LocalStorage) -> None:
    """A file replaced 200 times is whole in every read meanwhile."""
    storage.write("a", b"0" * 50_000)
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            data = storage.read("a")
            seen.add(data[:1] if data == data[:1] * 50_000 else data)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(200):
        storage.write("a", str(i % 10).encode() * 50_000)
    done.set()
    reader.join()
    assert all(len(data) == 1 for data in seen)


def test_a_failed_write_leaves_the_old_file(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old bytes, no temporary file, and the error of the system."""
    storage.write("a", b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="broken disk"):
        storage.write("a", b"new")
    assert (storage.read("a"), storage.list_dir("")) == (b"old", ["a"])


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_files_have_the_permissions_of_the_umask(storage: LocalStorage) -> None:
    """0o640 under the umask 0o027, for written and appended files alike, also when the umask changes later."""
    before = os.umask(0o027)
    try:
        storage.write("a", b"1")
        storage.append("b", b"1")
    finally:
        os.umask(before)
    assert [(storage.root / name).stat().st_mode & 0o777 for name in "ab"] == [0o640, 0o640]


def test_read_range_at_and_past_the_end(storage: LocalStorage) -> None:
    """b"" at the end and past it; the rest when length is None or too long."""
    storage.write("a", b"0123456789")
    asked = [(0, 3), (8, None), (8, 99), (10, None), (10, 5), (99, None), (99, 1), (3, 0)]
    found = [storage.read_range("a", offset, length) for offset, length in asked]
    assert found == [b"012", b"89", b"89", b"", b"", b"", b"", b""]


@pytest.mark.parametrize("read", ["read", "read_range"])
def test_a_missing_file_is_file_not_found(storage: LocalStorage, read: str) -> None:
    """FileNotFoundError for reads."""
    with pytest.raises(FileNotFoundError):
        getattr(storage, read)(*(("no",) if read == "read" else ("no", 0)))


def test_stat_version_changes_with_the_content(storage: LocalStorage) -> None:
    """Another version after a replacement by the same number of bytes, and after an append; equal without a change."""
    storage.write("a", b"1")
    versions = [storage.stat("a"), storage.stat("a")]
    storage.write("a", b"2")
    versions.append(storage.stat("a"))
    storage.append("a", b"3")
    versions.append(storage.stat("a"))
    assert versions[0] == versions[1]
    assert len({stat.version for stat in versions if stat}) == 3
    assert [stat.size for stat in versions if stat] == [1, 1, 1, 2]


def test_scan_lists_everything_sorted_by_path(storage: LocalStorage) -> None:
    """Every file in depth, sorted as text, also where a folder's name begins a file's name."""
    paths = ["a-b", "a/x", "a/y/z", "a.txt", ".runmirror/run.json", "b"]
    for path in paths:
        storage.write(path, path.encode())
    assert [(entry.path, entry.stat.size) for entry in storage.scan()] == [(path, len(path)) for path in sorted(paths)]
    assert [entry.path for entry in storage.scan("a")] == ["a/x", "a/y/z"]


@pytest.mark.skipif(os.name == "nt", reason="links and odd names")
def test_scan_passes_over_loops_dangling_links_and_odd_names(storage: LocalStorage) -> None:
    """A link to a parent is not followed, a dangling link and a name with a control character are left out."""
    storage.write("d/a", b"1")
    (storage.root / "d/loop").symlink_to(storage.root)
    (storage.root / "d/gone").symlink_to(storage.root / "nowhere")
    (storage.root / "d/bad\nname").write_bytes(b"")
    (storage.root / "d/link").symlink_to(storage.root / "d/a")
    assert [entry.path for entry in storage.scan()] == ["d/a", "d/link"]


def test_list_and_remove(storage: LocalStorage) -> None:
    """Sorted names; a folder that holds something stays, an empty one goes."""
    for path in ("d/b", "d/a", "d/c/x"):
        storage.write(path, b"")
    assert storage.list_dir("d") == ["a", "b", "c"]
    storage.remove_dir("d/c")
    assert storage.exists("d/c/x")
    storage.remove("d/c/x")
    storage.remove_dir("d/c")
    assert storage.list_dir("d") == ["a", "b"]
    assert storage.list_dir("d/a") == []


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", ".", "a\\b", "a\nb", "\x00", "a/\x7f"]
)
def test_paths_that_could_leave_the_root_are_refused(storage: LocalStorage, path: str) -> None:
    """ValueError from every method, and the message shows the path."""
    for call in (storage.read, storage.exists, storage.stat, storage.remove, storage.list_dir, storage.url):
        with pytest.raises(ValueError, match="relative path"):
            call(path)
    with pytest.raises(ValueError, match="relative path"):
        storage.append(path, b"")
    with pytest.raises(ValueError, match="relative path"):
        storage.write(path, b"")


@given(st.text(max_size=30))
def test_an_accepted_path_stays_below_the_root(path: str) -> None:
    """Whatever check_path lets through, joined to a root, is inside it."""
    try:
        check_path(path)
    except ValueError:
        return
    assert os.path.normpath(os.path.join("/root", path)).startswith("/root")


def test_pickles_without_descriptors(storage: LocalStorage) -> None:
    """The copy writes to the same folder."""
    storage.append("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    copy.append("a", b"2")
    assert storage.read("a") == b"12"


def test_keeps_few_descriptors_and_closes_the_least_recently_used(storage: LocalStorage) -> None:
    """Never more than MAX_OPEN_FILES; the file in constant use stays open; nothing is lost."""
    names = [f"f{i}" for i in range(3 * module.MAX_OPEN_FILES)]
    for name in names:
        storage.append("hot", b".")
        hot = storage._open_files["hot"]
        storage.append(name, b"1")
        assert storage._open_files["hot"] == hot
        assert len(storage._open_files) <= module.MAX_OPEN_FILES
    assert storage.read("hot") == b"." * len(names)
    assert all(storage.read(name) == b"1" for name in names)


def test_close_lets_go_and_the_instance_goes_on(storage: LocalStorage) -> None:
    """No descriptor is left; a later append works."""
    with storage:
        storage.append("a", b"1")
        storage.flush()
    assert not storage._open_files
    storage.append("a", b"2")
    assert storage.read("a") == b"12"
    storage.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_appends_with_descriptors_of_its_own(storage: LocalStorage) -> None:
    """Both processes' appends are there, and the parent's descriptors still work after the child closed."""
    storage.append("a", b"parent ")
    pid = os.fork()
    if pid == 0:
        try:
            storage.append("a", b"child ")
            storage.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    storage.append("a", b"parent")
    assert storage.read("a") == b"parent child parent"
    storage.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_another_thread_appends_is_not_blocked(storage: LocalStorage) -> None:
    """The child writes, appends and removes though the lock was held when it was forked."""
    storage.append("a", b"1")
    with storage._lock:
        forked = threading.Thread(target=lambda: pids.append(_fork_and_use(storage)))
        pids: list[int] = []
        forked.start()
        forked.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert storage.read("b") == b"12"


def _fork_and_use(storage: LocalStorage) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        storage.write("b", b"1")
        storage.append("b", b"2")
        storage.remove("c")
        storage.flush()
        os._exit(0)
    return pid


def test_appends_of_many_threads_stay_whole(storage: LocalStorage) -> None:
    """4 x 200 lines of 5,000 bytes, none torn or mixed."""
    lines = [letter.encode() * 5000 + b"\n" for letter in "abcd"]
    threads = [
        threading.Thread(target=lambda line=line: [storage.append("a", line) for _ in range(200)]) for line in lines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = storage.read("a").splitlines(keepends=True)
    assert sorted(found) == sorted(lines * 200)


LIMITED = """
import errno, resource, sys
from runmirror.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
storage.append("a", b"x" * 900 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for _ in range(3):
    try:
        storage.append("a", b"y" * 500 + b"\\n")
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise SystemExit("the append did not fail")
    assert storage.stat("a").size == 901, storage.stat("a")
storage.append("a", b"z" * 50 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
storage.append("a", b"y" * 500 + b"\\n")
assert [len(line) for line in storage.read("a").splitlines()] == [900, 50, 500]
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs RLIMIT_FSIZE")
def test_an_append_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """EFBIG is raised, no byte of the row stays, and a row that fits is taken afterwards (a real file size limit)."""
    subprocess.run([sys.executable, "-W", "error", "-c", LIMITED, str(tmp_path)], check=True, timeout=60)


def test_half_a_row_that_cannot_be_taken_back_is_taken_back_later(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk refuses even to cut the half row, the next append does it first."""
    storage.append("a", b"whole\n")
    real_write, real_truncate = os.write, os.ftruncate
    full = [True]

    def write(descriptor: int, data: bytes) -> int:
        if full[0] and len(data) > 3:
            return real_write(descriptor, data[:3])
        if full[0]:
            raise OSError(errno.ENOSPC, "full")
        return real_write(descriptor, data)

    def truncate(descriptor: int, size: int) -> None:
        if full[0]:
            raise OSError(errno.EIO, "no")
        real_truncate(descriptor, size)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(OSError, match="full"):
        storage.append("a", b"123456")
    full[0] = False
    storage.append("a", b"next\n")
    assert storage.read("a") == b"whole\nnext\n"


def test_an_append_that_the_system_takes_in_parts_is_completed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are there when every write takes 4 bytes at most."""
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:4]))
    storage.append("a", b"0123456789\n")
    monkeypatch.undo()
    assert storage.read("a") == b"0123456789\n"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_signal_handler_may_append_while_its_thread_appends(storage: LocalStorage) -> None:
    """No deadlock: the handler's lines and the loop's are all there."""
    before = signal.signal(signal.SIGALRM, lambda *_: storage.append("a", b"handler\n"))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(3000):
            storage.append("a", b"loop\n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    lines = storage.read("a").splitlines()
    assert lines.count(b"loop") == 3000
    assert set(lines) <= {b"loop", b"handler"}


@pytest.mark.parametrize("name", ["plain", "with space", "per%20cent", "ünï", "a#b?c"])
def test_url_and_path_lead_to_the_same_folder(tmp_path: Path, name: str) -> None:
    """The folder itself, by path, by Path and by the URI that url() gives."""
    root = tmp_path / name
    uri = LocalStorage(root).url()
    assert uri.startswith("file:///")
    assert [local_root(given) for given in (root, str(root), uri)] == [str(root)] * 3
    assert isinstance(storage_from_uri(uri), LocalStorage)


def test_relative_paths_and_home_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the moment of creation, whatever the working directory is later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    storage = LocalStorage("runs/1")
    monkeypatch.chdir("/")
    storage.write("a", b"1")
    assert (tmp_path / "runs/1/a").exists()
    assert local_root("~/x") == str(tmp_path / "home/x")


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("gs://", "no bucket"),
        ("ftp://me:secret@host/x", "ftp://host: credentials"),
        ("gs://bucket/../x", "relative path"),
        ("file://runs/7", "host 'runs'"),
    ],
)
def test_a_place_that_is_not_supported_is_named(uri: str, named: str) -> None:
    """ValueError that names the scheme or the host, instead of a folder somewhere else."""
    with pytest.raises(ValueError, match=named):
        storage_from_uri(uri)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs mkfifo")
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device"])
def test_what_is_no_regular_file_counts_as_missing(storage: LocalStorage, kind: str) -> None:
    """A pipe without a writer and an endless device: no wait, no bytes; the file beside it is read."""
    storage.write("b", b"two")
    path = storage.root / "a"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(storage.root.parent / "pipe")
        path.symlink_to("../pipe")
    for read in (lambda: storage.read("a"), lambda: storage.read_range("a", 0, 10)):
        with pytest.raises(FileNotFoundError):
            read()
    assert storage.stat("a") is None
    assert [(entry.path, storage.read(entry.path)) for entry in storage.scan()] == [("b", b"two")]


ON_LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc/self/fd")


def replace_file(path: Path, content: bytes) -> None:
    """As an editor saves: a new file is renamed over the old one."""
    path.with_name("saved").write_bytes(content)
    path.with_name("saved").replace(path)


@ON_LINUX
@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (b"one\ntwo\n", b"one\ntwo\nthree\nfour\n"),  # a copy
        (b"one\ntwo", b"one\ntwo\nthree\nfour\n"),  # without the last newline
        (b"one\nTWO\n", b"one\nTWO\nthree\nfour\n"),  # its last line edited
        (b"one\n", b"one\ntwo\nthree\nfour\n"),  # an old copy
    ],
)
def test_a_file_replaced_under_the_writer_gets_what_it_lacks(
    storage: LocalStorage, saved: bytes, expected: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next flush, with one warning; what is appended then goes into it too."""
    storage.append("m", b"one\n")
    storage.append("m", b"two\n")
    replace_file(storage.root / "m", saved)
    for line in (b"three\n", b"four\n"):
        storage.append("m", line)
    storage.flush()
    assert storage.read("m") == expected
    storage.append("m", b"five\n")
    storage.close()
    assert storage.read("m") == expected + b"five\n"
    assert caplog.text.count("was replaced while it was written") == 1


@pytest.mark.parametrize("saved", [b"of another run\n", b"", None])
def test_another_file_at_the_path_is_left_alone(
    storage: LocalStorage, saved: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A log that was removed, or begun anew by someone else, gets nothing of the old one; one warning."""
    storage.append("m", b"one\n")
    if saved is None:
        storage.root.joinpath("m").unlink()
    else:
        replace_file(storage.root / "m", saved)
    storage.append("m", b"two\n")
    storage.flush()
    storage.close()
    assert (storage.read("m") if storage.exists("m") else None) == saved
    assert caplog.text.count("was removed, or is another file now") == 1


@ON_LINUX
def test_a_replaced_file_on_a_full_disk_is_tried_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines that can't be added yet are added by the next flush."""
    storage.append("m", b"one\n")
    replace_file(storage.root / "m", b"one\n")
    storage.append("m", b"two\n")

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        storage.flush()
    assert storage.read("m") == b"one\n"
    assert "can't be added yet" in caplog.text
    storage.flush()
    assert storage.read("m") == b"one\ntwo\n"
