"""Runs in a cloud, read: found by one listing, imported, followed, shown and verified, at the price of few requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import runmirror
from runmirror.catalogue import check_runs
from runmirror.cli import app, push
from runmirror.doctor import examine
from runmirror.exceptions import NotALogError
from runmirror.find import find_runs
from runmirror.follow import Follower
from runmirror.log import layout
from runmirror.log.sources import list_files
from runmirror.show import show_runs
from runmirror.storage import CloudStorage, LocalStorage, storage_from_uri
from runmirror.targets import make_target
from runmirror.testing.dummy import read_dummy
from tests.cloud import BUCKET, URI, options, reading, until, upload
from tests.logs import flat_log, nested_log
from tests.servers.gcs import GcsServer, gcs_server

EXP = f"gs://{BUCKET}/exp"


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with gcs_server() as found:
        yield found


@pytest.fixture
def logs(server: GcsServer, tmp_path: Path) -> Path:
    """Two runs of tinker-cookbook and one of ours, local and in the bucket."""
    folder = tmp_path / "exp"
    flat_log(folder / "a/flat")
    nested_log(folder / "b/nested")
    with runmirror.start(folder / "ours", {"lr": 1}, code=False) as run:
        for n in range(5):
            run.log_metrics({"reward": n / 7})
    upload(server, folder, "exp")
    server.reset_counters()
    return folder


def grow(server: GcsServer, key: str, *rows: dict[str, Any]) -> None:
    """Append rows to a log as another machine's upload would."""
    name = f"{BUCKET}/{key}/metrics.jsonl"
    server.put(name, (server.contents(name) or b"") + b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def names(server: GcsServer, *paths: str, **more: Any) -> list[str]:
    return [one.name for one in find_runs(paths, storage_options=server.options, **more)]


def test_runs_are_found_by_one_listing(server: GcsServer, logs: Path) -> None:
    """A folder, a run, its metrics file, globs, the bucket; names as local ones have them; hidden folders are left out."""
    server.put(f"{BUCKET}/exp/.trash/x/metrics.jsonl", b"{}\n")
    assert names(server, EXP) == names(server, str(logs)) == ["a/flat", "b/nested", "ours"]
    assert dict(server.calls) == {"list": 1}
    assert names(server, f"{EXP}/a/flat") == names(server, f"{EXP}/a/flat/metrics.jsonl") == ["flat"]
    assert names(server, f"{EXP}/*/[fn]*") == ["a/flat", "b/nested"]
    assert names(server, f"{EXP}/**/nested") == ["b/nested"]
    assert names(server, f"gs://{BUCKET}") == ["exp/a/flat", "exp/b/nested", "exp/ours"]
    assert names(server, f"gs://{BUCKET}", max_depth=2) == ["exp/ours"]
    assert names(server, f"{EXP}/a", str(logs / "a")) == ["gs/runs-bucket/exp/a/flat", str(logs / "a/flat")[1:]]


def test_names_that_look_like_globs_are_names(server: GcsServer) -> None:
    """x[1] is not x1, and ``lr=*`` is a run's name when it is there."""
    for name in ("x[1]", "x1", "lr=*", "lr=2", "ä ö"):
        server.put(f"{BUCKET}/odd/{name}/metrics.jsonl", json.dumps({"step": 0, "name": 1}).encode() + b"\n")
    assert names(server, f"gs://{BUCKET}/odd/x[1]") == ["x[1]"]
    assert names(server, f"gs://{BUCKET}/odd/lr=*") == ["lr=*"]
    assert len(names(server, f"gs://{BUCKET}/odd")) == 5
    assert runmirror.read_run(f"gs://{BUCKET}/odd/x[1]", read=reading(server)).metrics()["name"] == [1]


def test_nothing_found_says_so(server: GcsServer, logs: Path) -> None:
    """An empty folder, a scheme that isn't one, runs of transformers, credentials in the URI."""
    server.put(f"{BUCKET}/hf/out/checkpoint-1/trainer_state.json", b"{}")
    for uri, message in (
        (f"gs://{BUCKET}/none", "holds no run"),
        ("nosuch://x/y", "knows no scheme"),
        (f"gs://{BUCKET}/hf", "copy them first"),
        ("gs://user:pass@bucket/x", "credentials in the URI"),
    ):
        with pytest.raises(NotALogError, match=message) as error:
            find_runs([uri], storage_options=server.options)
        assert "pass@" not in str(error.value)


@pytest.mark.parametrize("sink", ["tensorboard", "dummy"])
def test_an_import_brings_the_same_as_from_a_folder(server: GcsServer, logs: Path, tmp_path: Path, sink: str) -> None:
    """Same counts and points; again, nothing is sent. No object of a log that is not ours is touched."""
    where = {name: {{"tensorboard": "logdir"}.get(sink, "folder"): str(tmp_path / name)} for name in ("near", "far")}
    near = runmirror.import_runs([logs], sink, where["near"])
    before = {name: server.stored(name).generation for name in server.names(BUCKET)}
    far = runmirror.import_runs([EXP], sink, where["far"], read=reading(server))
    assert far.ok
    assert [(r.name, r.rows, r.points, r.files, r.source) for r in far.runs] == [
        (r.name, r.rows, r.points, r.files, r.source) for r in near.runs
    ]
    assert server.by_name[f"{BUCKET}/exp/a/flat/metrics.jsonl"] == {"media": 1}
    result = runmirror.verify([EXP], sink, where["far"], read=reading(server))
    assert result.ok
    assert result.totals()["matching"] == near.as_dict()["totals"]["points"]
    server.reset_counters()
    again = runmirror.import_runs([EXP], sink, where["far"], read=reading(server))
    assert again.as_dict()["totals"]["rows"] == 0
    assert server.calls["list"] == 1
    new = set(server.names(BUCKET)) - set(before)
    assert {name for name in new if not name.startswith(f"{BUCKET}/exp/ours/.runmirror/mirror/")} == set()
    assert all(server.stored(name).generation == generation for name, generation in before.items())


def test_the_health_of_runs_in_a_cloud(server: GcsServer, logs: Path) -> None:
    """As of the same runs in a folder, with the options that reach the cloud."""
    far = check_runs([EXP], read=reading(server))
    assert [(run.name, run.rows, run.error) for run in far] == [
        (run.name, run.rows, run.error) for run in check_runs([logs])
    ]
    assert all(run.rows for run in far)


def test_other_frameworks_logs(server: GcsServer, tmp_path: Path) -> None:
    """A file of verl that is named, and prime-rl's metrics.jsonl."""
    verl = b"".join(json.dumps({"step": n, "data": {"critic/score": n}}).encode() + b"\n" for n in range(4))
    server.put(f"{BUCKET}/verl/job.jsonl", verl)
    rows = [{"step": n, "time": 1.7e9 + n, "reward": n} for n in range(4)]
    server.put(f"{BUCKET}/prime/metrics.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    for uri, source, key in (("verl/job.jsonl", "verl", "critic/score"), ("prime", "prime-rl", "reward")):
        run = runmirror.read_run(f"gs://{BUCKET}/{uri}", read=reading(server))
        assert run.source == source
        assert run.metrics()[key] == [0, 1, 2, 3]
    done = runmirror.import_runs(
        [f"gs://{BUCKET}/verl/*.jsonl"], "dummy", {"folder": str(tmp_path)}, read=reading(server)
    )
    assert [(run.name, run.rows) for run in done.runs] == [("job", 4)]


@pytest.mark.slow
def test_processes_share_an_import(server: GcsServer, logs: Path, tmp_path: Path) -> None:
    """--workers 2: each process makes its own connection."""
    done = runmirror.import_runs([EXP], "dummy", {"folder": str(tmp_path / "d")}, read=reading(server), workers=2)
    assert done.ok
    assert done.count("complete") == 3


def test_the_state_of_another_machine_is_known(
    server: GcsServer, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run of ours a copy lies in the log_path: a second machine sends nothing again, and shows how far it is."""
    where = {"folder": str(tmp_path / "dummy")}
    runmirror.import_runs([f"{EXP}/ours"], "dummy", where, read=reading(server))
    (copy,) = server.names(f"{BUCKET}/exp/ours/.runmirror/mirror/")
    assert json.loads(server.contents(copy) or b"")["ordinal"] == 5
    monkeypatch.setenv("RUNMIRROR_HOME", str(tmp_path / "elsewhere"))
    (shown,) = show_runs([f"{EXP}/ours"], storage_options=server.options)
    assert [(sink.sink, sink.rows, sink.behind) for sink in shown.sinks] == [("dummy", 5, 0)]
    assert not (tmp_path / "elsewhere").exists()
    plan = runmirror.plan([f"{EXP}/ours"], "dummy", where, read=reading(server))
    assert (plan[0].state, plan[0].rows) == ("complete", 0)
    again = runmirror.import_runs([f"{EXP}/ours"], "dummy", where, read=reading(server))
    assert again.as_dict()["totals"]["files"] == 0


def test_a_run_is_read_as_it_is_when_asked(server: GcsServer, logs: Path) -> None:
    """New rows are seen by the next question; a finished one costs a listing and what is not known yet."""
    run = runmirror.read_run(f"{EXP}/a/flat", read=reading(server))
    local = runmirror.read_run(logs / "a/flat")
    assert run.metrics() == local.metrics()
    assert run.config == local.config
    assert [one.name for one in run.checkpoints] == [one.name for one in local.checkpoints]
    assert {n: it.splits for n, it in run.iterations.items()} == {n: it.splits for n, it in local.iterations.items()}
    assert run.iterations[0].path("report") == f"{EXP}/a/flat/train_iteration_000000.html"
    grow(server, "exp/a/flat", {"step": 99, "env/all/reward/total": 9.0})
    assert run.metrics()["step"][-1] == 99


def test_the_files_of_a_run_cost_one_listing(server: GcsServer, logs: Path) -> None:
    """Each with its size and the version that a question about it alone tells; without rollouts, nothing is listed."""
    kinds = frozenset({*layout.ROLLOUT_KINDS, "config", "checkpoints"})
    for name in ("a/flat", "b/nested"):
        storage = CloudStorage(f"{EXP}/{name}", server.options, local=False)
        server.reset_counters()
        found = list_files(storage, kinds)
        assert dict(server.calls) == {"list": 1}
        here = list_files(LocalStorage(logs / name), kinds)
        assert [(one.path, one.kind, one.size) for one in found] == [(one.path, one.kind, one.size) for one in here]
        assert len(found) >= 5
        for one in found:
            stat = storage.stat(one.path)
            assert stat is not None
            assert (one.size, one.version) == (stat.size, stat.version)
        server.reset_counters()
        assert len(list_files(storage, frozenset({"config"}))) == 1
        assert "list" not in server.calls
        storage.close()


@pytest.mark.slow
def test_show_and_doctor(server: GcsServer, logs: Path, tmp_path: Path) -> None:
    """As for local runs; a place that can't be reached is one problem with a fix."""
    near = {one.name: one for one in show_runs([logs])}
    for one in show_runs([EXP], storage_options=server.options):
        assert one.error is None
        assert (one.rows, one.reward, one.status) == (near[one.name].rows, near[one.name].reward, near[one.name].status)
    checks = examine([EXP], "dummy", {"folder": str(tmp_path)}, read=reading(server))
    assert [check for check in checks if not check.ok] == []
    assert any("3 below" in check.found for check in checks)
    server.faults.down = True
    checks = examine([EXP], "dummy", {"folder": str(tmp_path)}, read=reading(server))
    (problem,) = [check for check in checks if not check.ok]
    assert "--storage-option" in problem.fix


def command(server: GcsServer, *words: str) -> list[str]:
    given = [word for name, value in server.options.items() for word in ("--storage-option", f"{name}={value}")]
    return [*words, *given]


def test_the_command_line(server: GcsServer, logs: Path, tmp_path: Path) -> None:
    """--storage-option at every command that takes a path; a wrong one is an error that doesn't repeat it."""
    cli = CliRunner()
    sink = ["--to", "dummy", "-o", f"folder={tmp_path / 'd'}"]
    assert cli.invoke(app, command(server, "import", EXP, *sink)).exit_code == 0
    for words in (["import", EXP, "--dry-run", *sink], ["verify", EXP, *sink], ["show", EXP], ["doctor", EXP, *sink]):
        done = cli.invoke(app, command(server, *words))
        assert done.exit_code == 0, done.output
    done = cli.invoke(app, command(server, "mirror", EXP, *sink, "--exit-idle", "1s", "--interval", "0.2"))
    assert done.exit_code == 0, done.output
    done = cli.invoke(app, ["show", EXP, "--storage-option", "s3cr3t"])
    assert (done.exit_code, "s3cr3t" in done.output) == (1, False)


@pytest.mark.slow
def test_push(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """--list shows what waits; push uploads it; then there is nothing; one that can't be is exit code 3."""
    cli = CliRunner()
    monkeypatch.setattr(push, "STUCK", 1.0)
    assert cli.invoke(app, ["push"]).output == "nothing waits on this machine\n"
    server.faults.down = True
    run = runmirror.start(URI, code=False, storage_options=options(server))
    run.log_metrics({"a": 1})
    assert "writing" in cli.invoke(app, ["push", "--list"]).output
    run.finish(deadline=0.5)
    listed = cli.invoke(app, ["push", "--list"])
    assert listed.exit_code == 0
    assert "waiting" in listed.output
    shown = cli.invoke(app, command(server, "show", URI))
    assert shown.exit_code == 0, shown.output
    assert "on this machine only; its writer is gone: run `runmirror push`" in " ".join(shown.output.split())
    failed = cli.invoke(app, command(server, "push"))
    assert failed.exit_code == 3
    assert "problem" in failed.output
    server.faults.down = False
    assert "nothing of it" in cli.invoke(app, command(server, "push", f"{URI}-other")).output
    done = cli.invoke(app, command(server, "push", URI))
    assert done.exit_code == 0
    assert "uploaded" in done.output
    assert json.loads(cli.invoke(app, ["push", "--json"]).output) == []


def test_a_copy_in_the_bucket_is_another_run(server: GcsServer, logs: Path, tmp_path: Path) -> None:
    """It gets an id of its own; when the original is gone it was moved, and keeps its id (to a process that looks then)."""
    upload(server, logs / "ours", "copied/ours")
    server.put(f"{BUCKET}/copied/ours/.runmirror/run.json", moved(logs, f"{EXP}/ours"))
    server.put(f"{BUCKET}/exp/ours/.runmirror/run.json", moved(logs, f"{EXP}/ours"))
    ids = [runmirror.read_run(f"gs://{BUCKET}/{at}/ours", read=reading(server)).run_id for at in ("exp", "copied")]
    assert ids[0] != ids[1]
    server.put(f"{BUCKET}/moved/metrics.jsonl", b"")
    server.put(f"{BUCKET}/moved/.runmirror/run.json", moved(logs, f"{EXP}/nowhere"))
    assert runmirror.read_run(f"gs://{BUCKET}/moved", read=reading(server)).run_id == ids[0]


def moved(logs: Path, url: str) -> bytes:
    """run.json of the local run, as if made at ``url``."""
    return json.dumps(json.loads((logs / "ours/.runmirror/run.json").read_bytes()) | {"url": url}).encode()


# -- following


class Following:
    """A Follower in a thread."""

    def __init__(self, server: GcsServer, folder: Path, paths: list[str], interval: float = 0.2) -> None:
        self.lines: list[str] = []
        self.folder = folder
        target = make_target("dummy", {"folder": str(folder)})
        self.follower = Follower(paths, [target], read=reading(server), interval=interval, tell=self.lines.append)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.follower.run, args=(self._stop,))

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def rest(self, server: GcsServer, looks: int = 3, pages: int = 1) -> None:
        """Until so many looks, one after the other, cost nothing but their listing, of so many pages."""

        def others() -> dict[str, int]:
            return {name: count for name, count in server.calls.items() if name != "list"}

        while True:
            before, listed = others(), server.calls["list"]
            until(lambda listed=listed: server.calls["list"] >= listed + looks * pages)  # type: ignore[misc]
            if others() == before:
                return

    def rows(self, name: str) -> int:
        held = read_dummy(self.folder) if self.folder.exists() else {}
        return len(held[name].rows) if name in held else 0


@pytest.mark.slow
def test_a_follower_elsewhere_sees_new_rows(server: GcsServer, tmp_path: Path) -> None:
    """Each poll is one listing; a run that grew costs one range read of what is new; one that rests costs nothing."""
    rows = [{"step": n, "_timestamp": time.time(), "pad": "x" * 1000, "a": n} for n in range(1000)]
    for name in ("one", "two"):
        server.put(f"{BUCKET}/exp/{name}/metrics.jsonl", b"")
        grow(server, f"exp/{name}", *rows)
    with Following(server, tmp_path / "d", [EXP]) as following:
        until(lambda: following.rows("one") == following.rows("two") == 1000)
        following.rest(server)
        server.reset_counters()
        down = server.bytes_down
        for n in range(1000, 1005):
            grow(server, "exp/one", {"step": n, "_timestamp": time.time(), "pad": "x" * 1000, "a": n})
            until(lambda n=n: following.rows("one") == n + 1)  # type: ignore[misc]
        assert set(server.calls) == {"list", "media"}
        assert server.by_name[f"{BUCKET}/exp/one/metrics.jsonl"] == {"media": 5}
        assert server.by_name[f"{BUCKET}/exp/two/metrics.jsonl"] == {}
        assert server.bytes_down - down < 5 * 40_000 + 2_000 * server.calls["list"]
        server.put(f"{BUCKET}/exp/new/run/metrics.jsonl", b"")
        grow(server, "exp/new/run", {"step": 0, "a": 1.0})
        until(lambda: following.rows("new/run") == 1)
        server.faults.down = True
        until(lambda: any("can't be listed" in line for line in following.lines))
        server.faults.down = False
        grow(server, "exp/one", {"step": 2000, "_timestamp": time.time(), "a": 1})
        until(lambda: following.rows("one") == 1006)


@pytest.mark.slow
def test_many_runs_cost_one_listing_a_look(server: GcsServer, tmp_path: Path) -> None:
    """300 resting runs of 4 files: 2 pages a look, and nothing else."""
    for n in range(300):
        for name in ("config.json", "checkpoints.jsonl", "code.diff"):
            server.put(f"{BUCKET}/exp/{n:03d}/{name}", b"{}\n")
        server.put(f"{BUCKET}/exp/{n:03d}/metrics.jsonl", b'{"step":0,"_timestamp":1.0,"a":1}\n')
    with Following(server, tmp_path / "d", [EXP], interval=0.5) as following:
        until(lambda: len(following.follower.lanes) == 300)
        until(lambda: all(lane.state == "ended" or lane.rows for lane in following.follower.lanes), 120)
        following.rest(server, 2, pages=2)
        server.reset_counters()
        until(lambda: server.calls["list"] >= 2 * 2)
        assert set(server.calls) == {"list"}
        assert server.calls["list"] <= 2 * 3


@pytest.mark.slow
def test_a_follower_on_the_writers_machine_reads_the_spool(server: GcsServer, tmp_path: Path) -> None:
    """Rows are there before any upload; when the run is over and the spool gone, it goes on with the objects."""
    with Following(server, tmp_path / "d", [EXP]) as following:
        run = runmirror.start(URI, code=False, storage_options=options(server, interval=60))
        until(lambda: following.follower.lanes)
        for n in range(10):
            run.log_metrics({"a": n})
        until(lambda: following.rows("run") == 10)
        assert len((server.contents(f"{BUCKET}/exp/run/metrics.jsonl") or b"").splitlines()) < 10
        run.log_metrics({"a": 10})
        run.finish()
        until(lambda: any("finished, all of it" in line for line in following.lines))
        assert following.rows("run") == 11


def test_a_run_that_was_removed(server: GcsServer, tmp_path: Path) -> None:
    """The follower goes on with the others."""
    for name in ("one", "two"):
        server.put(f"{BUCKET}/exp/{name}/metrics.jsonl", b'{"step":0,"a":1}\n')
    with Following(server, tmp_path / "d", [EXP]) as following:
        until(lambda: following.rows("one") == following.rows("two") == 1)
        storage_from_uri(f"{EXP}/one", **server.options).remove("metrics.jsonl")
        following.rest(server)
        grow(server, "exp/two", {"step": 1, "a": 2})
        until(lambda: following.rows("two") == 2)


def test_a_view_reads_as_a_folder_does(server: GcsServer, logs: Path) -> None:
    """Every read of a Listed is what LocalStorage says of the same files."""
    (found,) = find_runs([f"{EXP}/b/nested"], storage_options=server.options)
    view, local = found.view, LocalStorage(logs / "b/nested")
    assert view is not None
    entries = [entry.path for entry in local.scan()]
    assert [entry.path for entry in view.scan()] == entries
    assert [e.path for e in view.scan("iteration_000000")] == [e.path for e in local.scan("iteration_000000")]
    for folder in ("", "iteration_000008", "none"):
        assert view.list_dir(folder) == local.list_dir(folder)
    for path in entries:
        data = local.read(path)
        assert view.read(path) == data
        for start in (0, 1, len(data) // 2, len(data) - 1, len(data), len(data) + 9):
            assert view.read_range(path, start, 7) == data[start : start + 7]
            assert view.read_range(path, start) == data[start:]
    assert view.exists("iteration_000000")
    assert not view.exists("nothing")
    assert view.stat("nothing") is None
    with pytest.raises(FileNotFoundError):
        view.read("nothing")
    with pytest.raises(PermissionError, match="readers"):
        view.append("metrics.jsonl", b"x")


@pytest.mark.slow
def test_a_logdir_beside_the_runs_is_no_run(server: GcsServer) -> None:
    """Its folders have spools as well while they are written."""
    where = {"logdir": f"{EXP}/tb", "storage_options": options(server)}
    given = {"storage_options": options(server), "code": False}
    with runmirror.start(URI, report_to={"tensorboard": where}, **given) as run:
        run.log_metrics({"a": 1})
        until(lambda: any("tfevents" in name for name in server.names(f"{BUCKET}/exp/tb")))
        assert names(server, EXP) == ["run"]
    assert names(server, EXP) == ["run"]
