"""The writer's parts: lines from the end, repaired tails, appends that wait."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runmirror.exceptions import LogError
from runmirror.log import layout, writer
from runmirror.log.writer import Appender, checkpoint_line, count_lines, last_step, lines_backwards, repair, size_of
from runmirror.starting import start
from runmirror.storage import LocalStorage, Storage
from runmirror.storage.local import Entry, Stat


class MemoryStorage(LocalStorage):
    """A Storage that is no local folder, with what tinker-cookbook's protocol has and no more."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.files: dict[str, bytes] = {}
        self.broken = False

    def url(self, path: str = "") -> str:
        return f"memory://run/{path}"

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write(self, path: str, data: bytes) -> None:  # type: ignore[override]
        self.files[path] = data

    def append(self, path: str, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("the cloud is away")
        self.files[path] = self.files.get(path, b"") + data

    def exists(self, path: str) -> bool:
        return path in self.files

    def stat(self, path: str) -> Stat | None:
        if path not in self.files:
            raise FileNotFoundError(path)
        return Stat(len(self.files[path]), 0.0, "")

    def read_range(self, path: str, offset: int, length: int | None = None) -> bytes:
        return self.read(path)[offset:][:length]

    def list_dir(self, prefix: str) -> list[str]:
        start = f"{prefix}/"
        return sorted({path[len(start) :].split("/")[0] for path in self.files if path.startswith(start)})

    def scan(self, prefix: str = "") -> Iterator[Entry]:
        raise AssertionError("not in tinker-cookbook's protocol")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        raise AssertionError("a Storage that was given is not closed")


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line)), st.booleans(), st.integers(1, 20))
def test_lines_come_backwards(lines: list[bytes], newline: bool, block: int) -> None:
    """Every line, last first, for any length of lines and blocks, with and without a final newline."""
    storage = MemoryStorage()
    data = b"\n".join(lines) + (b"\n" if newline and lines else b"")
    storage.files["f"] = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK", block)
        found = list(lines_backwards(storage, "f"))
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    while expected and expected[0] == b"" and len(found) < len(expected):  # a blank first line doesn't matter
        expected.pop(0)
    assert found == expected[::-1]


@given(st.lists(st.binary(min_size=1, max_size=9).filter(lambda line: b"\n" not in line)), st.integers(0, 60))
def test_lines_backwards_stop_at_the_limit(lines: list[bytes], limit: int) -> None:
    """The last lines, all of them whole, and none that begins before the limit."""
    storage = MemoryStorage()
    storage.files["f"] = data = b"".join(line + b"\n" for line in lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK", 7)
        found = list(lines_backwards(storage, "f", limit))
    assert found == lines[::-1][: len(found)]
    assert sum(len(line) + 1 for line in found) <= limit or limit >= len(data)


def test_a_missing_file_has_no_lines() -> None:
    """Nothing, 0 bytes, 0 lines, no step; and a repair does nothing."""
    storage = MemoryStorage()
    repair(storage, "f")
    assert (list(lines_backwards(storage, "f")), size_of(storage, "f"), count_lines(storage, "f")) == ([], 0, 0)
    assert (last_step(storage, "f"), storage.files) == (None, {})


@given(st.binary(max_size=60), st.integers(1, 9))
def test_a_repaired_file_is_whole_lines_and_keeps_every_line_it_had(data: bytes, block: int) -> None:
    """The lines before the tail stay byte for byte; what is cut is kept, but for NULs; a second repair does nothing."""
    storage = MemoryStorage()
    storage.files["f"] = data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK", block)
        repair(storage, "f")
    head, tail = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
    fixed = storage.files["f"]
    assert fixed.startswith(head)
    assert fixed == b"" or fixed.endswith(b"\n")
    kept = storage.files.get(f"{layout.OWN}/torn-1.txt", b"")
    assert fixed[len(head) :].rstrip(b"\n") + kept == tail.rstrip(b"\0")
    before = dict(storage.files)
    repair(storage, "f")
    assert storage.files == before


def test_torn_tails_are_numbered(tmp_path: Path) -> None:
    """torn-1, torn-2, torn-3: none is overwritten."""
    storage = LocalStorage(tmp_path)
    for number in range(1, 4):
        storage.write("f", b"{}\n" + b"x" * number)
        repair(storage, "f")
        assert storage.read(f".runmirror/torn-{number}.txt") == b"x" * number
    assert storage.read("f") == b"{}\n"


def test_the_last_step_is_found_under_any_of_its_names() -> None:
    """The last row's that names one: step, progress/batch, global_step."""
    storage = MemoryStorage()
    for line, step in (
        (b'{"a":1}\n', None),
        (b'{"global_step":3}\n', 3),
        (b'{"progress/batch":4.0}\n', 4),
        (b'{"step":2,"progress/batch":9}\n', 2),
        (b'{"step":"x"}\nbroken\n', 2),
    ):
        storage.append("f", line)
        assert last_step(storage, "f") == step


def test_a_run_over_a_storage_of_another_make(caplog: pytest.LogCaptureFixture) -> None:
    """Rows, config and journal are there; a torn tail is repaired; whatever append raises, rows wait and training goes on."""
    storage = MemoryStorage()
    assert isinstance(storage, Storage)
    run = start(storage, {"lr": 1}, code=False)
    run.log_metrics({"a": 1})
    run.finish("killed")
    storage.files[layout.METRICS] += b'{"step":1,'
    with caplog.at_level(logging.WARNING, "runmirror"):
        run = start(storage, {"lr": 1}, code=False)
        storage.broken = True
        run.log_metrics({"a": 2})
        assert (run.status().waiting, run.status().error) == (1, "RuntimeError: the cloud is away")
        storage.broken = False
        run.finish()
    rows = [json.loads(line) for line in storage.files[layout.METRICS].splitlines()]
    assert [(row["step"], row["a"]) for row in rows] == [(0, 1), (1, 2)]
    assert storage.files[f"{layout.OWN}/torn-1.txt"] == b'{"step":1,'
    assert (run.log_path, run.url) == ("memory://run/", "memory://run/")
    assert len(caplog.records) == 2


def test_an_appender_counts_what_it_drops() -> None:
    """2 lines wait, 1 is lost, then the 2 are written in order before the next one."""
    storage = MemoryStorage()
    appender = Appender(storage, "f", max_lines=2)
    storage.broken = True
    assert [appender.append(line) for line in (b"1\n", b"2\n", b"3\n")] == [False] * 3
    assert (appender.held, appender.lost, appender.written, appender.waiting()) == (2, 1, 0, b"2\n3\n")
    storage.broken = False
    assert appender.append(b"4\n")
    assert (storage.files["f"], appender.held, appender.lost, appender.written) == (b"2\n3\n4\n", 0, 1, 3)


@given(
    st.one_of(st.text(), st.none(), st.integers()),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.floats(), st.integers(), st.binary(), st.none())),
)
def test_a_checkpoint_line_takes_anything(name: object, more: dict[str, object]) -> None:
    """One line of JSON with a name that is text, for any name, loop state and extra fields."""
    line = checkpoint_line(name, {"batch": 10**5000, "final": None}, {"state_path": 3}, more, {"odd": object(), **more})
    assert line.count(b"\n") == 1
    assert isinstance(json.loads(line)["name"], str)


@pytest.mark.parametrize("link", [".runmirror", ".runmirror/writer.lock", ".runmirror/journal.jsonl"])
def test_a_log_path_whose_own_files_lead_elsewhere_is_refused(tmp_path: Path, link: str) -> None:
    """LogError that names the link; what it leads to stays as it was."""
    target = tmp_path / "target"
    if link == ".runmirror":
        target.mkdir()
    else:
        target.write_bytes(b"precious")
    path = tmp_path / "run" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(LogError, match=f"{link} is a symbolic link"):
        writer.lock_writer(LocalStorage(tmp_path / "run"))
    assert not list(target.iterdir()) if target.is_dir() else target.read_bytes() == b"precious"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc/self/fd")
def test_metrics_that_an_editor_saved_lose_no_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows logged after the file was replaced are in the new one, at a checkpoint and before the end is noted."""
    run = start(tmp_path / "run", code=False)
    metrics = tmp_path / "run/metrics.jsonl"
    for rows in (2, 4):
        run.log_metrics({"a": 1})
        (tmp_path / "saved").write_bytes(metrics.read_bytes())
        (tmp_path / "saved").replace(metrics)
        run.log_metrics({"a": 2})
        if rows == 2:
            run.log_checkpoint("c", state_path="x")
            assert count_lines(run.storage) == 2
    run.finish()
    assert [json.loads(line)["step"] for line in metrics.read_bytes().splitlines()] == [0, 1, 2, 3]
    journal = [json.loads(line) for line in (tmp_path / "run/.runmirror/journal.jsonl").read_bytes().splitlines()]
    assert journal[-1]["offset"] == metrics.stat().st_size
    assert caplog.text.count("was replaced while it was written") == 2


def test_a_line_appended_in_the_midst_of_a_retry_waits_for_its_turn(tmp_path: Path) -> None:
    """As a signal handler's does that logs while lines wait for room on the disk."""

    class Interrupted(LocalStorage):
        full = True
        handler: tuple[bytes, ...] = ()

        def append(self, path: str, data: bytes) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().append(path, data)
            if self.handler:
                line, self.handler = self.handler[0], ()
                appender.append(line)

    storage = Interrupted(tmp_path)
    appender = Appender(storage, layout.METRICS)
    assert not appender.append(b"0\n")
    assert not appender.append(b"1\n")
    storage.full, storage.handler = False, (b"2\n",)
    assert appender.append(b"3\n")
    assert (tmp_path / layout.METRICS).read_bytes() == b"0\n1\n2\n3\n"
    assert (appender.held, appender.lost, appender.written) == (0, 0, 4)
