from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from runmirror.exceptions import Refused, Retry
from runmirror.log.rows import Row
from runmirror.sinks import event_file, event_history, event_notes
from runmirror.sinks.base import RunInfo, Sink
from runmirror.sinks.event_reader import read_events, read_points
from runmirror.sinks.event_writer import RunWriter
from runmirror.sinks.registry import make_sink as make_named_sink
from runmirror.sinks.tensorboard import TensorBoardSink, safe_name, tensorboard_command

from .runs import (
    START,
    Op,
    Shown,
    eventful_rows,
    file,
    make_run,
    make_sink,
    mirror,
    play,
    row,
    surviving,
    the_bytes,
)

FINISHED = make_run(end=START + 60, status="finished", config={"lr": 1e-4})


def shown_by_default_loader(folder: Path) -> Shown:
    """tag -> step -> (time, value) by the rule of TensorBoard's default loader (proved in test_tensorboard_server)."""
    shown = {tag: {step: (at, value) for at, step, value in points} for tag, points in read_points(folder).items()}
    return {tag: points for tag, points in shown.items() if points}


def shown_by_python_loader(folder: Path) -> Shown:
    """tag -> step -> (time, value) that TensorBoard's Python loader keeps; the last one where a step comes twice."""
    accumulator = EventAccumulator(str(folder), tensor_size_guidance={"scalars": 0})
    accumulator.Reload()
    shown: Shown = {}
    for tag, content in accumulator.AllSummaryMetadata().items():
        if content.plugin_data.plugin_name == "scalars":
            for event in accumulator.Tensors(tag):
                (value,) = event.tensor_proto.float_val or struct.unpack("<f", event.tensor_proto.tensor_content)
                shown.setdefault(tag, {})[event.step] = (event.wall_time, value)
    return {tag: dict(sorted(points.items())) for tag, points in shown.items() if points}


def as_float32(shown: Shown) -> Shown:
    def narrow(value: float) -> float:
        try:
            return float(struct.unpack("<f", struct.pack("<f", value))[0])
        except OverflowError:
            return math.copysign(math.inf, value)

    return {tag: {step: (at, narrow(value)) for step, (at, value) in points.items()} for tag, points in shown.items()}


def same(left: Shown, right: Shown) -> bool:
    return repr(left) == repr(right)  # NaN included


def event_path(folder: Path) -> Path:
    (path,) = event_file.event_files(folder)
    return path


def test_is_a_sink(tmp_path: Path) -> None:
    """Found by name, checked options, the whole protocol; making one touches no disk."""
    sink = make_named_sink("tensorboard", {"logdir": str(tmp_path / "tb")})
    assert isinstance(sink, TensorBoardSink)
    assert isinstance(sink, Sink)
    assert sink.destination() == str(tmp_path / "tb")
    assert list(tmp_path.iterdir()) == []


def test_logdir_comes_from_where_people_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """logging_dir before logdir before TENSORBOARD_LOGGING_DIR before the default; a URI stays one."""
    cwd = Path.cwd()
    assert make_named_sink("tensorboard").destination() == str(cwd / "tensorboard-mirror")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "/env")
    assert make_named_sink("tensorboard").destination() == "/env"
    assert make_named_sink("tensorboard", {"logdir": "/a"}).destination() == "/a"
    assert make_named_sink("tensorboard", {"logging_dir": "/b"}).destination() == "/b"
    assert make_named_sink("tensorboard", {"logdir": "gs://bucket/tb/"}).destination() == "gs://bucket/tb"
    assert make_named_sink("tensorboard", {"logdir": "file:///c"}).destination() == "/c"


def test_imports_nothing_heavy() -> None:
    """No tensorboard with runmirror, no TensorFlow or torch with the sink."""
    code = (
        "import sys, runmirror, runmirror.sinks.registry; assert 'tensorboard' not in sys.modules;"
        "import runmirror.sinks.tensorboard; assert not {'tensorflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mirrors_rows(tmp_path: Path) -> None:
    """Every key, step, time and value, in one folder named as the run."""
    rows = [row(at, at, {"loss": at / 2, "env/all/reward": float(at)}) for at in range(20)]
    sink = make_sink(tmp_path)
    opened = sink.open(make_run("exp/seed 1"), None)
    assert (opened.url, opened.tracker_run_id, opened.position) == (str(tmp_path / "exp/seed 1"), "exp/seed 1", 0)
    assert sink.put(rows) == []
    assert sink.flush(5) == 20
    assert sink.open(make_run("exp/seed 1"), None).position == 20
    sink.close(None, 5)
    assert shown_by_default_loader(tmp_path / "exp/seed 1") == surviving(rows)
    assert shown_by_python_loader(tmp_path / "exp/seed 1") == surviving(rows)
    assert event_path(tmp_path / "exp/seed 1").name == "events.out.tfevents.1700000000.runmirror.v1"


def test_eventful_run_shows_what_survived(tmp_path: Path) -> None:
    """In both loaders: no abandoned point, no lost late one, the last write of each step."""
    rows = eventful_rows()
    folder = mirror(tmp_path, rows)
    expected = as_float32(surviving(rows))
    python = shown_by_python_loader(folder)
    assert same(python, expected)
    default = shown_by_default_loader(folder)
    # Only what never had a point before the rewind can't be taken away without a tombstone.
    assert {tag: points for tag, points in default.items() if tag in expected} == expected
    assert set(default) - set(expected) == {"eval/late", "only/once"}


def test_tombstones_end_what_lost_all_its_points(tmp_path: Path) -> None:
    """A NaN at the step of the rewind instead of the abandoned points."""
    rows = eventful_rows()
    folder = mirror(tmp_path, rows, tombstones=True)
    default = shown_by_default_loader(folder)
    assert [(step, math.isnan(value)) for step, (_, value) in default["eval/late"].items()] == [(2, True)]
    assert [(step, math.isnan(value)) for step, (_, value) in default["only/once"].items()] == [(4, True)]


@st.composite
def logs(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    step = 0
    for ordinal in range(draw(st.integers(1, 25))):
        step = max(0, step + draw(st.sampled_from([1, 1, 1, 1, 0, 2, -1, -2, -4])))
        rewind = None
        if ordinal and draw(st.integers(0, 7)) == 0:
            rewind = draw(st.integers(0, step + 1))
            step = rewind + draw(st.integers(0, 2))
        keys = draw(st.sets(st.sampled_from("abcdef"), max_size=4))
        metrics = {key: float(ordinal * 10 + at) for at, key in enumerate(sorted(keys))}
        rows.append(row(ordinal, step, metrics, rewind, fault="broken" if draw(st.integers(0, 15)) == 0 else ""))
    return rows


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(logs(), st.sampled_from([1, 3, 1000]), st.data())
def test_any_log_shows_what_survived(rows: list[Row], kept_shapes: int, data: st.DataObject) -> None:
    """In both loaders, for any mix of steps, keys and rewinds; cut anywhere and resumed, the same bytes."""
    with tempfile.TemporaryDirectory() as name, mock.patch.object(event_file, "_MAX_SHAPES", kept_shapes):
        written = [one if not one.fault else one.emptied(one.fault) for one in rows]
        expected = surviving(written)
        assert shown_by_python_loader(mirror(Path(name, "plain"), rows)) == expected
        folder = mirror(Path(name, "tombs"), rows, tombstones=True)
        shown = shown_by_default_loader(folder)
        numbers = {
            tag: {step: (at, value) for step, (at, value) in points.items() if not math.isnan(value)}
            for tag, points in shown.items()
        }
        assert {tag: points for tag, points in numbers.items() if points} == expected
        whole = the_bytes(folder)
        path = event_path(folder)
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size))])
        mirror(Path(name, "tombs"), rows, tombstones=True)
        assert the_bytes(folder) == whole


def eventful_ops() -> list[Op]:
    rows = eventful_rows()
    return [
        file("config.json", "config", b'{"lr": 0.0001}'),
        rows[:9],
        file("checkpoints.jsonl", "checkpoints", b'{"name": "000004", "batch": 4}\n'),
        rows[9:16],
        file("checkpoints.jsonl", "checkpoints", b'{"name": "000004", "batch": 4}\n{"name": "000008", "batch": 8}\n'),
        file("code.diff", "code", b"--- a\n+++ b\n"),
        rows[16:],
        FINISHED,
    ]


def record_ops(logdir: Path, ops: list[Op]) -> tuple[Path, list[int]]:
    """Play ``ops`` undisturbed: the run's folder, and the size of its event file after each."""
    sink = make_sink(logdir)
    folder = Path(sink.open(FINISHED, None).url)
    ends = []
    for op in ops:
        play(sink, [op])
        ends.append(event_path(folder).stat().st_size)
    return folder, ends


def resume_ops(logdir: Path, folder: Path, whole: bytes, cut: int, ops: list[Op], ends: list[int]) -> None:
    """Play on from where a process was killed that had written ``cut`` bytes."""
    path = event_path(folder)
    path.write_bytes(whole[:cut])
    sink = make_sink(logdir)
    sink.open(FINISHED, "run")
    play(sink, [op for op, end in zip(ops, ends, strict=True) if end > cut])
    sink.close(None, 5)


def test_resumed_after_any_kill_the_bytes_are_the_same(tmp_path: Path) -> None:
    """Byte for byte what an undisturbed run writes, for 250 random cuts of a run with rewinds, repairs, files, an end."""
    ops = eventful_ops()
    folder, ends = record_ops(tmp_path, ops)
    whole = event_path(folder).read_bytes()
    chance = random.Random(4)
    for cut in [0, *ends, *chance.sample(range(len(whole)), 245)]:
        resume_ops(tmp_path, folder, whole, cut, ops, ends)
        assert the_bytes(folder) == {event_path(folder).name: whole}, cut


@pytest.mark.slow
def test_resumed_after_a_kill_at_every_byte(tmp_path: Path) -> None:
    """The same for every cut of a small run with a late row and a rewind."""
    rows = [row(0, 1, {"a": 1.0}), row(1, 2, {"a": 2.0}), row(2, 1, {"a": 3.0}), row(3, 2, {"b": 1.0}, rewind=2)]
    ops: list[Op] = [rows, FINISHED]
    folder, ends = record_ops(tmp_path, ops)
    whole = event_path(folder).read_bytes()
    for cut in range(len(whole)):
        resume_ops(tmp_path, folder, whole, cut, ops, ends)
        assert event_path(folder).read_bytes() == whole, cut


def test_batches_make_no_difference(tmp_path: Path) -> None:
    """The same bytes row by row and all at once."""
    rows = eventful_rows()
    sink = make_sink(tmp_path / "one")
    sink.open(make_run(), None)
    for one in rows:
        sink.put([one])
    sink.close(None, 5)
    assert the_bytes(tmp_path / "one/run") == the_bytes(mirror(tmp_path / "all", rows))


def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    """Size, content and modification time of a finished run stay when everything comes again."""
    ops = eventful_ops()
    folder, _ = record_ops(tmp_path, ops)
    before = event_path(folder).stat()
    for _ in range(2):
        sink = make_sink(tmp_path)
        assert sink.open(FINISHED, None).position == 24
        play(sink, [op for op in ops if isinstance(op, list)] + ops[4:6] + [FINISHED])
    after = event_path(folder).stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def test_empty_rows_count(tmp_path: Path) -> None:
    """A row without values, broken or only text, is a record all the same: the position stays the ordinal."""
    rows = [row(0, 0, {}), row(1, 1, {"x": 1.0}, fault="lost"), row(2, 2, {"note": "hi"}), row(3, 3, {"x": 2.0})]
    folder = mirror(tmp_path, rows)
    sink = make_sink(tmp_path)
    assert sink.open(make_run(), None).position == 4
    sink.close(None, 5)
    assert shown_by_default_loader(folder) == {"x": {3: (START + 3, 2.0)}}
    assert [record.step for record in read_events(folder) if record.kind == "row"] == [0, 1, 2, 3]


def test_text_of_rows_is_text(tmp_path: Path) -> None:
    """Shown in the TEXT tab under a tag that no metric can have, cut when it is huge."""
    folder = mirror(tmp_path, [row(0, 0, {"answer": "**42**", "loss": 1.0}), row(1, 1, {"answer": "ä" * 100_000})])
    texts = [text for record in read_events(folder) for text in record.texts]
    assert texts[0] == ("runmirror/text/answer", "**42**")
    secret = mirror(tmp_path / "secret", [row(0, 0, {"url": "https://me:secret99@host/x"})])
    assert [text for record in read_events(secret) for _, text in record.texts] == ["https://***@host/x"]
    assert texts[1][1].startswith("*The first 65536 of 200000 bytes.*")
    assert shown_by_python_loader(folder) == {"loss": {0: (START, 1.0)}}


def test_odd_keys(tmp_path: Path) -> None:
    """Byte for byte the key; the empty and reserved ones come back as rejected."""
    keys = ["größe", "a", "a/b", "a//b", "/x/", "..", "😀 & <b>", "x" * 10_000, "tab\tnul\0", "q?=#%"]
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    metrics = {key: float(at) for at, key in enumerate(keys)}
    rejected = sink.put([row(0, 0, metrics | {"": 1.0, "s\ud800": 2.0, "s?": 3.0, "runmirror/config.json": 4.0})])
    sink.close(None, 5)
    assert [(one.ordinal, one.key) for one in rejected] == [(0, ""), (0, "s\ud800"), (0, "runmirror/config.json")]
    expected = {key: {0: (START, value)} for key, value in (metrics | {"s?": 3.0}).items()}
    assert shown_by_default_loader(folder) == expected
    assert shown_by_python_loader(folder) == expected


def test_odd_numbers(tmp_path: Path) -> None:
    """NaN and infinities stay, what float32 can't hold is infinite, steps are exact, times that are no numbers are not
    written: TensorBoard would read no further."""
    rows = [
        Row(0, {"x": math.nan, "y": math.inf, "z": 1e300}, -5, math.nan),
        Row(1, {"x": -math.inf, "y": 10**400, "z": True}, 2**53 + 1, 12.5),
        Row(2, {"x": 1.0}, 2**63 - 1, math.inf),
    ]
    folder = mirror(tmp_path, rows)
    assert same(
        shown_by_default_loader(folder),
        {
            "x": {-5: (START, math.nan), 2**53 + 1: (12.5, -math.inf), 2**63 - 1: (12.5, 1.0)},
            "y": {-5: (START, math.inf), 2**53 + 1: (12.5, math.inf)},
            "z": {-5: (START, math.inf), 2**53 + 1: (12.5, 1.0)},
        },
    )
    assert same(shown_by_python_loader(folder), shown_by_default_loader(folder))


def test_a_log_that_always_jumps_back_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late values are rejected, with their reason, once writing later points again has doubled the file."""
    monkeypatch.setattr(event_history, "_ALLOWANCE", 1000)
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    rows = [row(at, at // 2 + (1000 if at % 2 else 0), {"x": float(at)}) for at in range(400)]
    rejected = [one for start in range(0, 400, 50) for one in sink.put(rows[start : start + 50])]
    size = event_path(folder).stat().st_size
    assert sink.flush(5) == 400
    sink.close(None, 5)
    assert {one.key for one in rejected} == {"x"}
    assert 100 < len(rejected) < 200
    assert "comes after later steps" in rejected[0].reason
    assert size < 400 * 120
    left = [one for one in rows if one.ordinal not in {lost.ordinal for lost in rejected}]
    assert shown_by_default_loader(folder) == surviving(left)
    whole = the_bytes(folder)
    path = event_path(folder)
    path.write_bytes(path.read_bytes()[: size // 2])
    mirror(tmp_path, rows)
    assert the_bytes(folder) == whole


def test_another_encoder_begins_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later-sorting file, none of the old bytes changed, the same points, the rewind and late row included."""
    rows = eventful_rows()
    folder = mirror(tmp_path, rows[:12])
    old = the_bytes(folder)
    monkeypatch.setattr(event_file, "ENCODER", 2)
    sink = make_sink(tmp_path)
    assert sink.open(make_run(), None).position == 12
    sink.close(None, 5)
    assert the_bytes(folder) == old
    mirror(tmp_path, rows)
    new = the_bytes(folder)
    assert list(new) == [*old, f"{next(iter(old))}.0001"]
    assert old.items() <= new.items()
    assert same(shown_by_python_loader(folder), as_float32(surviving(rows)))
    sink = make_sink(tmp_path)
    assert sink.open(make_run(), None).position == len(rows)
    sink.close(None, 5)


def test_a_torn_record_that_does_not_come_again_is_left(tmp_path: Path) -> None:
    """A new segment; every row is there once, and nothing of the old file was cut."""
    rows = [row(at, at, {"loss": float(at)}) for at in range(10)]
    folder = mirror(tmp_path, rows[:5])
    path = event_path(folder)
    path.write_bytes(path.read_bytes()[:-3])
    torn = path.read_bytes()
    other = [*rows[:4], row(4, 4, {"loss": 0.5, "another": 1.0}), *rows[5:]]
    mirror(tmp_path, other)
    assert path.read_bytes() == torn
    assert shown_by_python_loader(folder) == surviving(other) == shown_by_default_loader(folder)
    sink = make_sink(tmp_path)
    assert sink.open(make_run(), None).position == 10
    sink.close(None, 5)


def test_damage_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Refused: the file, the offset, the rows before it, and what to remove."""
    folder = mirror(tmp_path, [row(at, at, {"loss": float(at)}) for at in range(10)])
    path = event_path(folder)
    raw = bytearray(path.read_bytes())
    raw[-60] ^= 4
    path.write_bytes(raw)
    sink = make_sink(tmp_path)
    with pytest.raises(Refused, match=rf"{path.name} is damaged at byte \d+ .*behind row 8.*remove the folder"):
        sink.open(make_run(), None)
    sink.close(None, 5)


def test_zeros_after_a_power_cut_are_left_behind(tmp_path: Path) -> None:
    """A new segment with the rows that were lost."""
    rows = [row(at, at, {"loss": float(at)}) for at in range(10)]
    folder = mirror(tmp_path, rows[:6])
    path = event_path(folder)
    path.write_bytes(path.read_bytes() + bytes(4096))
    mirror(tmp_path, rows)
    assert len(the_bytes(folder)) == 2
    assert shown_by_python_loader(folder) == surviving(rows) == shown_by_default_loader(folder)


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry while a write fails half way, the bytes of an undisturbed run once it doesn't."""
    rows = eventful_rows()
    whole = the_bytes(mirror(tmp_path / "other", rows))
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    sink.put(rows[:7])
    write = os.write
    left = [150]

    def full(descriptor: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = min(left[0], len(data))
        left[0] -= size
        return write(descriptor, data[:size])

    monkeypatch.setattr(event_file.os, "write", full)
    for _ in range(3):
        with pytest.raises(Retry, match="No space left"):
            sink.put(rows[7:])
    monkeypatch.undo()
    assert sink.put(rows[7:]) == []
    assert sink.flush(5) == len(rows)
    sink.close(None, 5)
    assert the_bytes(folder) == whole


def test_a_removed_folder_is_noticed(tmp_path: Path) -> None:
    """Refused at the next flush; opened again, the run is written anew."""
    rows = [row(at, at, {"loss": float(at)}) for at in range(3)]
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    sink.put(rows)
    shutil.rmtree(folder)
    with pytest.raises(Refused, match="removed or replaced"):
        sink.flush(5)
    with pytest.raises(Refused, match="row 3 came"):
        sink.put([row(3, 3, {})])
    assert sink.open(make_run(), "run").position == 0
    sink.put(rows)
    sink.close(None, 5)
    assert shown_by_default_loader(folder) == surviving(rows)


def test_config_becomes_hyperparameters(tmp_path: Path) -> None:
    """Flat keys with their types; None left out; lists, NaN and integers beyond a double as text; no experiment record."""
    config = {
        "lr": 1e-4,
        "n": None,
        "deep": {"on": True, "l": [1, 2], "d": {}},
        "seed": 2**60,
        "bad": math.nan,
        "s": "x",
    }
    folder = mirror(tmp_path, [row(0, 0, {"loss": 1.0})], make_run(config=config))
    accumulator = EventAccumulator(str(folder)).Reload()
    contents = accumulator.PluginTagToContent("hparams")
    assert list(contents) == ["_hparams_/session_start_info"]
    info = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in info.hparams.items()}
    assert values == {"lr": 1e-4, "deep.on": True, "deep.l": "[1, 2]", "seed": str(2**60), "bad": "nan", "s": "x"}
    assert type(values["deep.on"]) is bool
    assert info.start_time_secs == START


def kinds(folder: Path) -> list[str]:
    return [record.kind for record in read_events(folder)]


def test_a_config_that_comes_later_is_written_once(tmp_path: Path) -> None:
    """At the open that first knows it; another one is not, TensorBoard keeps the first."""
    folder = mirror(tmp_path, [row(0, 0, {"loss": 1.0})])
    assert kinds(folder) == ["version", "start", "describe", "describe", "row"]
    for config in ({"a": 1}, {"a": 2}):
        mirror(tmp_path, [], make_run(config=config))
    assert kinds(folder) == ["version", "start", "describe", "describe", "row", "hparams"]


def test_a_resumes_config_is_text(tmp_path: Path) -> None:
    """What it has otherwise, once, behind the rows; secrets masked. The hyperparameters stay those of the start."""
    config = {"lr": 1, "model": {"rank": 8}}
    run = make_run(config=config, resumes=({**config, "lr": 2, "api_key": "k3y-abcdef"},))
    for count in (1, 2, 2):
        sink = make_sink(tmp_path)
        opened = sink.open(run, None)
        sink.put([row(n, n, {"loss": 1.0}) for n in range(count)])
        sink.flush(1)
        sink.close(None, 10)
    folder = Path(opened.url)
    assert kinds(folder) == ["version", "start", "describe", "hparams", "describe", "row", "file", "row"]
    ((tag, text),) = [text for record in read_events(folder) for text in record.texts]
    assert (tag, json.loads(text.strip("`json\n"))) == ("runmirror/resume_1", {"lr": 2, "api_key": "***"})


def test_a_metric_is_described_before_its_first_point(tmp_path: Path) -> None:
    """Once, whenever it comes, and also behind a restart; a metric that nobody knows isn't."""
    rows = [row(n, n, {"reward": 1.0, "mine": 2.0} | ({"kl": 0.1} if n > 1 else {})) for n in range(4)]
    mirror(tmp_path, rows[:2])
    folder = mirror(tmp_path, rows)
    assert kinds(folder) == ["version", "start", "describe", "describe", "row", "row", "describe", "row", "row"]
    accumulator = EventAccumulator(str(folder)).Reload()
    shown = {tag: accumulator.SummaryMetadata(tag).summary_description for tag in ("reward", "kl", "mine")}
    assert shown["reward"].endswith("It should rise. (reward)")
    assert shown["kl"].startswith("KL divergence of the policy from the reference")
    assert shown["mine"] == ""
    assert len(accumulator.Tensors("reward")) == 4


def test_a_run_that_was_begun_without_descriptions_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte what it would have become, at a kill anywhere behind its first row."""
    ops = eventful_ops()
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "_describes", lambda writer: False)  # as before there were descriptions
        folder, ends = record_ops(tmp_path, ops)
    whole = event_path(folder).read_bytes()
    assert "describe" not in kinds(folder)
    chance = random.Random(5)
    for cut in [*ends, *chance.sample(range(ends[0], len(whole)), 40)]:
        resume_ops(tmp_path, folder, whole, cut, ops, ends)
        assert the_bytes(folder) == {event_path(folder).name: whole}, cut


@pytest.mark.parametrize(
    ("status", "known", "expected"),
    [("finished", True, 1), ("failed", True, 2), ("killed", True, 2), ("killed", False, None), ("running", True, None)],
)
def test_end_of_the_run(tmp_path: Path, status: Any, known: bool, expected: int | None) -> None:
    """SUCCESS or FAILURE with the end's time, once; nothing of a run that goes on or whose end is only guessed."""
    folder = mirror(tmp_path, [row(0, 0, {"loss": 1.0})])
    for end in (START + 9, START + 10):
        sink = make_sink(tmp_path)
        sink.open(make_run(), None)
        sink.close(make_run(status=status, status_known=known, end=end), 5)
    contents = EventAccumulator(str(folder)).Reload().PluginTagToContent("hparams") if expected else {}
    if expected:
        info = plugin_data_pb2.HParamsPluginData.FromString(contents["_hparams_/session_end_info"]).session_end_info
        assert (info.status, info.end_time_secs) == (expected, START + 9)
    assert kinds(folder).count("end") == (1 if expected else 0)


def test_a_run_without_anything_leaves_no_event_file(tmp_path: Path) -> None:
    """Not even when it ended."""
    sink = make_sink(tmp_path)
    folder = Path(sink.open(FINISHED, None).url)
    sink.close(FINISHED, 5)
    assert the_bytes(folder) == {}


def test_files_are_text(tmp_path: Path) -> None:
    """Config and code fenced, checkpoints as a table, once per content, also without any rows; other kinds left out."""
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    for _ in range(2):
        sink.put_file(file("config.json", "config", b'{"a":[1]}'))
        sink.put_file(file("code.diff", "code", b"+ ``` fence\n" * 10_000))
        sink.put_file(
            file("checkpoints.jsonl", "checkpoints", b'{"name": "a|b", "batch": 4}\n{"name": "c", "x": [1]}\n')
        )
        sink.put_file(file("train_iteration_000000.html", "report", b"<html>"))
    sink.put([row(0, 0, {"loss": 1.0})])
    sink.close(None, 5)
    texts = [text for record in read_events(folder) for text in record.texts]
    assert [tag for tag, _ in texts] == ["runmirror/config.json", "runmirror/code.diff", "runmirror/checkpoints.jsonl"]
    assert texts[0][1] == '```json\n{\n  "a": [\n    1\n  ]\n}\n```'
    assert texts[1][1].startswith("*The first 65536 of 120000 bytes.*\n\n````diff\n+ ``` fence\n")
    assert texts[2][1].splitlines() == [
        "| name | batch | x |", "| --- | --- | --- |", "| a\\|b | 4 |  |", "| c |  | [1] |",
    ]  # fmt: skip


def test_odd_files_are_text_too(tmp_path: Path) -> None:
    """No JSON, no UTF-8, no content: shown as they are."""
    sink = make_sink(tmp_path)
    folder = Path(sink.open(make_run(), None).url)
    sink.put_file(file("config.json", "config", b"{not json \xff"))
    sink.put_file(file("checkpoints.jsonl", "checkpoints", b"[1]\nnonsense"))
    sink.put_file(file("code.diff", "code", b""))
    sink.close(None, 5)
    texts = dict(text for record in read_events(folder) for text in record.texts)
    assert texts["runmirror/config.json"] == "```json\n{not json \ufffd\n```"
    assert texts["runmirror/checkpoints.jsonl"] == "```\n[1]\nnonsense\n```"
    assert texts["runmirror/code.diff"] == "```diff\n\n```"


def test_many_checkpoints_show_the_newest(tmp_path: Path) -> None:
    """Within the limit, the last ones, with a note."""
    lines = b"".join(json.dumps({"name": f"{at:06d}", "path": "x" * 100}).encode() + b"\n" for at in range(2000))
    text = event_notes.file_text("checkpoints", lines)
    assert text.startswith("*The last ")
    assert text.endswith(f"| 001999 | {'x' * 100} |")
    assert len(text) < event_notes.TEXT_LIMIT + 200


def test_another_run_of_the_same_name_gets_its_own_folder(tmp_path: Path) -> None:
    """The name, then with the id's first six characters, then more: the same folder each time it is opened."""
    for _ in range(2):
        urls = []
        for run_id in ("abcdef111111-x", "abcdef222222-y", "abcdef222222-z", "../../etc", "../../etd"):
            sink = make_sink(tmp_path)
            urls.append(sink.open(RunInfo(run_id, "exp/run"), None).url)
            sink.close(None, 5)
        names = [str(Path(url).relative_to(tmp_path)) for url in urls]
        assert names[:4] == ["exp/run", "exp/run-abcdef", "exp/run-abcdef222222", "exp/run-______"]
        assert names[4].startswith("exp/run-")
        assert len(set(names)) == 5


def test_the_folder_it_had_is_kept(tmp_path: Path) -> None:
    """tracker_run_id is honoured when the run was renamed, or its marker lost; not when another run has it by now."""
    rows = [row(0, 0, {"loss": 1.0})]
    folder = mirror(tmp_path, rows, make_run("old name"))
    (folder / ".runmirror.json").write_text("{")
    sink = make_sink(tmp_path)
    opened = sink.open(make_run("new name"), "old name")
    assert (opened.url, opened.position) == (str(folder), 1)
    assert json.loads((folder / ".runmirror.json").read_text())["run_id"] == make_run().run_id
    opened = sink.open(RunInfo("another", "new name"), "old name")
    assert (opened.tracker_run_id, opened.position) == ("new name", 0)
    sink.close(None, 5)


def test_event_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """A folder with someone's own event files is not ours to write in."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.out.tfevents.1700000000.host.1.0").write_bytes(b"")
    (tmp_path / "other").write_text("a file")
    sink = make_sink(tmp_path)
    assert sink.open(make_run(), None).tracker_run_id == "run-abcdef"
    assert sink.open(make_run("other"), None).tracker_run_id == "other-abcdef"
    sink.close(None, 5)


@pytest.mark.parametrize(
    "name",
    [
        "../out",
        "/etc/x",
        "a/../../../out",
        "..",
        "",
        "a\0b",
        "..\\..\\out",
        "x" * 5000,
        "\ud800",
        ".runmirror.json",
        "./.",
    ],
)
def test_no_name_leads_out(tmp_path: Path, name: str) -> None:
    """Whatever the run or the state calls it, the folder is inside the logdir."""
    logdir = tmp_path / "deep/er/tb"
    for run, known in ((make_run(name), None), (make_run("x"), name)):
        folder = mirror_open(logdir, run, known)
        assert folder.resolve().is_relative_to(logdir.resolve())
        assert folder.resolve() != logdir.resolve()
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]


def mirror_open(logdir: Path, run: RunInfo, known: str | None) -> Path:
    sink = make_sink(logdir)
    opened = sink.open(run, known)
    sink.put([row(0, 0, {"loss": 1.0})])
    sink.close(None, 5)
    return Path(opened.url)


def test_long_names_stay_distinct() -> None:
    """Cut with a hash, the same each time."""
    one, two = safe_name("x" * 300 + "1"), safe_name("x" * 300 + "2")
    assert one != two
    assert one == safe_name("x" * 300 + "1")
    assert len(one) == 200


def test_two_mirrors_do_not_mix(tmp_path: Path) -> None:
    """The second gets Retry while the first is open, then takes over."""
    first, second = make_sink(tmp_path), make_sink(tmp_path)
    first.open(make_run(), None)
    with pytest.raises(Retry, match="another mirror writes"):
        second.open(make_run(), None)
    first.put([row(0, 0, {"loss": 1.0})])
    first.close(None, 5)
    assert second.open(make_run(), None).position == 1
    second.close(None, 5)


def test_the_lock_is_not_bound_to_a_thread(tmp_path: Path) -> None:
    """Opened in one thread and closed in another, the folder is free."""
    first, second = make_sink(tmp_path), make_sink(tmp_path)
    thread = threading.Thread(target=first.open, args=(make_run(), None))
    thread.start()
    thread.join()
    first.close(None, 5)
    assert second.open(make_run(), None).position == 0
    second.close(None, 5)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs permissions that hold")
def test_no_permission_needs_a_person(tmp_path: Path) -> None:
    """Refused, with the path."""
    tmp_path.chmod(0o500)
    with pytest.raises(Refused, match=str(tmp_path)):
        make_sink(tmp_path / "tb").open(make_run(), None)


def test_logdir_below_a_file_needs_a_person(tmp_path: Path) -> None:
    """Refused, with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="file"):
        make_sink(tmp_path / "file/tb").open(make_run(), None)


def test_command_for_people() -> None:
    """Quoted for a shell, and with every point kept."""
    assert tensorboard_command("/a b") == "tensorboard --logdir '/a b' --samples_per_plugin scalars=100000"


CHILD = """
import sys
from pathlib import Path
from tests.sinks.runs import eventful_rows, make_run, make_sink
sink = make_sink(Path(sys.argv[1]))
position = sink.open(make_run(), None).position
rows = eventful_rows()
lap = len(rows)
print("open", flush=True)
for ordinal in range(position, 400 * lap):
    one = rows[ordinal % lap]
    one.ordinal = ordinal
    sink.put([one])
sink.close(None, 5)
"""


@pytest.mark.slow
def test_killed_processes_leave_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    """After eight SIGKILLs, the same file."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", CHILD]
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, stdout=subprocess.DEVNULL)
    chance = random.Random(7)
    for _ in range(8):
        with subprocess.Popen([*command, str(tmp_path / "killed")], env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.15))
            child.send_signal(signal.SIGKILL)
    subprocess.run([*command, str(tmp_path / "killed")], check=True, env=environment, stdout=subprocess.DEVNULL)
    assert the_bytes(tmp_path / "killed/run") == the_bytes(tmp_path / "whole/run")
