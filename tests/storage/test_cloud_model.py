"""CloudStorage against a model: rows, files, outages, lost answers, kills and moves between machines, in any order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runmirror.exceptions import LogError
from runmirror.storage import CloudStorage, remote, spools, upload, uploader
from tests.servers.gcs import BUCKET, gcs_server

URI = f"gs://{BUCKET}/model"
METRICS = "metrics.jsonl"


class Story:
    """What happened to one log_path, and what has to be in it."""

    def __init__(self, seed: int, machines: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.homes = [folder / f"machine{number}" for number in range(machines)]
        self.patch = monkeypatch
        self.machine = 0
        self.storage: CloudStorage | None = None
        self.rows: list[bytes] = []
        self.certain: set[bytes] = set()  # rows that have to be in the object in the end
        self.pending: dict[int, list[bytes]] = {number: [] for number in range(machines)}
        self.files: dict[str, bytes | None] = {}
        self.told: list[str] = []

    def run(self, steps: int) -> None:
        with gcs_server() as self.server:
            try:
                for _ in range(steps):
                    verb = self.rng.choice("aaaaaaaaffwwrkox")
                    self.told.append(verb)
                    getattr(self, f"do_{verb}")()
                self.server.faults.down = False
                self.server.faults.error_rate = self.server.faults.lost_rate = 0.0
                self.writer().flush(60)
                self.sure()
                assert self.storage is not None
                self.storage.close()
                self.check()
            finally:
                self.server.faults.down = False
                if self.storage is not None:
                    self.storage.close(0.1)

    def writer(self) -> CloudStorage:
        if self.storage is None:
            self.patch.setenv("RUNMIRROR_HOME", str(self.homes[self.machine]))
            options = {**self.server.options, "upload_interval": self.rng.choice([0.0, 0.01, 600])}
            self.storage = CloudStorage(URI, options)
            self.storage.claim((METRICS,))
        return self.storage

    def sure(self) -> None:
        """What this machine has written is uploaded."""
        self.certain.update(self.pending[self.machine])
        self.pending[self.machine].clear()

    def do_a(self) -> None:
        row = b'{"row": %d, "text": "%s"}\n' % (len(self.rows), b"x" * self.rng.choice([10, 1000, 120_000]))
        self.writer().append(METRICS, row)
        self.rows.append(row)
        self.pending[self.machine].append(row)

    def do_f(self) -> None:
        try:
            self.writer().flush(0.0 if self.server.faults.down else 30.0)
        except TimeoutError:
            return
        if not self.server.faults.down:
            self.sure()

    def do_w(self) -> None:
        name = f"report-{self.rng.randrange(3)}.html"
        self.files[name] = b"<p>%d" % self.rng.randrange(10**6)
        self.writer().write(name, self.files[name] or b"")

    def do_r(self) -> None:
        name = f"report-{self.rng.randrange(3)}.html"
        self.writer().remove(name)
        self.files[name] = None

    def do_k(self) -> None:
        """Killed: nothing is tidied up. Perhaps it goes on somewhere else."""
        storage, self.storage = self.storage, None
        if storage is None:
            return
        if storage._uploader is not None:
            storage._uploader.stop()
        assert storage._file_lock is not None
        storage._file_lock.release()
        storage._reset()
        moved = self.rng.randrange(len(self.homes))
        if moved != self.machine:
            self.server.faults.down = False  # a machine that can't reach the store can't know of the other
            self.machine = moved
            self.pending[moved].clear()  # what was left here is kept aside now
            self.files.clear()

    def do_o(self) -> None:
        """An outage begins or ends. It never begins where nobody writes: a start would know nothing."""
        self.writer()
        self.server.faults.down = not self.server.faults.down

    def do_x(self) -> None:
        """The network is bad, or good again."""
        bad = self.server.faults.error_rate == 0.0
        self.server.faults.error_rate = self.server.faults.lost_rate = 0.1 if bad else 0.0

    def check(self) -> None:
        found = (self.server.contents(f"{BUCKET}/model/{METRICS}") or b"").splitlines(keepends=True)
        order = {row: number for number, row in enumerate(self.rows)}
        assert [order[row] for row in found] == sorted({order[row] for row in found})
        assert self.certain <= set(found)
        if len(self.homes) == 1:
            assert found == self.rows
        for name, content in self.files.items():
            assert self.server.contents(f"{BUCKET}/model/{name}") == content, name
        assert [info for info in spools() if not info.taken_by] == []
        versions = self.server.history[f"{BUCKET}/model/{METRICS}"]
        assert all(not stored.chunks or stored.chunks[-1][-1:] in (b"\n", b"") for _, stored in versions)


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_any_story_ends_well(seed: int, machines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row once and in order: on one machine all of them, on several all that were uploaded; files as written last."""
    monkeypatch.setattr(upload, "GAP", 0.0)
    monkeypatch.setattr(uploader, "HURRY", 0.05)
    monkeypatch.setattr(uploader, "FIRST", 0.0)
    monkeypatch.setattr(remote, "PAUSES", (0.005, 0.01, 0.02))
    story = Story(seed, machines, tmp_path, monkeypatch)
    try:
        story.run(60)
    except (AssertionError, LogError, OSError) as error:
        raise AssertionError(f"seed {seed}: {''.join(story.told)}: {error!r}") from error
