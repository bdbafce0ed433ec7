"""The promise of the writer under SIGKILL: a row whose log_metrics returned is in the log, and the log is whole lines."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd
import polars as pl
import pytest

from runmirror.log import layout
from runmirror.log.status import read_journal
from runmirror.starting import start
from runmirror.storage import LocalStorage

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")

KILLER = """
import os, random, select, signal, sys, time
import runmirror
log_path, kills, seed, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
longest = 0.06 if size < 100 else 0.02  # seconds of a life: what comes together is read with pandas
dice = random.Random(seed)
for life in range(kills):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run = runmirror.start(log_path, {"life": life}, code=False)
        pad = {f"pad/{i}": i / 7 for i in range(size)}
        number = 0
        while True:
            run.log_metrics({"life": life, "number": number, **pad})
            os.write(writer, b"%d\\n" % number)
            if number % 20 == 0:
                run.log_checkpoint(f"{life}-{number}", state_path=f"s/{life}/{number}")
                os.write(writer, b"c%d\\n" % number)
            number += 1
    os.close(writer)
    if life % 5:  # every fifth is killed while it opens, or soon after
        select.select([reader], [], [], 20)
        end = time.monotonic() + dice.uniform(0, longest)
    else:
        end = time.monotonic() + dice.uniform(0, 0.02)
    told = b""
    while (left := end - time.monotonic()) > 0:  # keep the pipe empty, or the child stands still
        if select.select([reader], [], [], left)[0]:
            told += os.read(reader, 65536)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while piece := os.read(reader, 65536):
        told += piece
    os.close(reader)
    whole = told[: told.rfind(b"\\n") + 1].decode().split()
    print(life, *whole, flush=True)
"""


def kill_writers(log_path: Path, kills: int, size: int) -> tuple[set[tuple[int, int]], set[str]]:
    """Start and kill writers on one log_path. What they were told is written: (life, number) of rows, checkpoint names."""
    seed = random.randrange(2**32)
    print("seed", seed)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", KILLER, str(log_path), str(kills), str(seed), str(size)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    acknowledged, checkpoints = set(), set()
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == kills
    for life, *told in lines:
        acknowledged |= {(int(life), int(number)) for number in told if number[0] != "c"}
        checkpoints |= {f"{life}-{number[1:]}" for number in told if number[0] == "c"}
    return acknowledged, checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("size", [pytest.param(5, id="rows of 100 bytes"), pytest.param(400, id="rows of 10 KB")])
def test_no_acknowledged_row_is_lost_in_50_kills(tmp_path: Path, size: int) -> None:
    """0 rows lost, 0 twice, 0 unreadable lines after 50 writers were killed at random moments and resumed."""
    log_path = tmp_path / "run"
    acknowledged, checkpoints = kill_writers(log_path, 50, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = start(log_path, code=False)
    run.finish()
    assert len(acknowledged) > 50
    data = (log_path / layout.METRICS).read_bytes()
    assert data.endswith(b"\n")
    found = [json.loads(line) for line in data.splitlines()]
    written = [(row["life"], row["number"]) for row in found]
    assert len(set(written)) == len(written)
    assert acknowledged - set(written) == set()
    assert len(set(written) - acknowledged) <= 50  # at most the one row each was killed in
    assert [row["step"] for row in found] == list(range(len(found)))
    lines = [json.loads(line) for line in (log_path / layout.CHECKPOINTS).read_bytes().splitlines()]
    assert checkpoints - {line["name"] for line in lines} == set()
    entries = read_journal(LocalStorage(log_path))
    assert (entries[0].event, entries[-1].status) == ("started", "finished")
    assert all(data[entry.offset - 1 : entry.offset] in (b"", b"\n") for entry in entries)
    path = log_path / layout.METRICS
    assert len(pd.read_json(path, lines=True)) == len(found)
    assert pl.read_ndjson(path)["number"].to_list() == [row["number"] for row in found]


def test_every_truncation_of_a_log_is_repaired(tmp_path: Path) -> None:
    """Cut at every byte of its last two rows, a log opens with the rows that are whole, and goes on at the next step."""
    with start(tmp_path / "whole", code=False) as run:
        for i in range(4):
            run.log_metrics({"i": i, "t": "ü\n"})
    data = (tmp_path / "whole" / layout.METRICS).read_bytes()
    second = data.index(b"\n", data.index(b"\n") + 1) + 1
    for end in range(second, len(data) + 1):
        log_path = tmp_path / str(end)
        log_path.mkdir()
        (log_path / layout.METRICS).write_bytes(data[:end])
        with start(log_path, code=False) as run:
            run.log_metrics({"i": "new"})
        found = [json.loads(line) for line in (log_path / layout.METRICS).read_bytes().splitlines()]
        whole = data[:end].count(b"\n") + (data[end - 1 : end] == b"}" and data[end : end + 1] == b"\n")
        assert [row["step"] for row in found] == list(range(whole + 1))
        assert found[-1]["i"] == "new"
