"""A training that is killed and goes on from its latest checkpoint: the log, its reports, and what a tracker shows."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runmirror
from runmirror.importer import import_runs
from runmirror.log.layout import file_name
from tests.sinks.test_rollouts import REWARDS, counts, histograms
from tests.test_live import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="SIGKILL")]

ITERATIONS = 30
TRAIN = f"""
import os, sys, time
import runmirror
life = int(sys.argv[1])
run = runmirror.start("run", code=False, report_to={{"tensorboard": {{"logdir": "tb"}}}})
checkpoint = run.latest_checkpoint()
first = 0 if checkpoint is None else checkpoint.batch
os.write(1, b"start %d\\n" % first)
for i in range(first, {ITERATIONS}):
    with run.iteration(i) as it:
        step = {{"ob_len": 5, "ac_len": 7, "reward": float(life), "metrics": {{"i": i}}}}
        messages = [{{"role": "user", "content": f"life {{life}} iteration {{i}}"}}] * 40
        run.log_rollouts(i, [[{{"steps": [step], "messages": messages}}] * 3])
        it["life"] = life
    if (i + 1) % 5 == 0:
        run.log_checkpoint(f"{{i + 1:06d}}", batch=i + 1, state_path=f"state/{{i + 1}}")
    os.write(1, b"%d\\n" % i)
    time.sleep(0.01)
run.finish()
"""


def train(folder: Path, life: int, kill_after: int | None) -> list[str]:
    """Train in a process, and kill it once it did so many iterations; what it said."""
    told = folder / f"told-{life}"
    with told.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", TRAIN, str(life)], cwd=folder, stdout=output)
    if kill_after is not None:
        until(lambda: told.read_bytes().count(b"\n") > kill_after)
        time.sleep(random.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
    code = process.wait(120)
    assert code == (0 if kill_after is None else -signal.SIGKILL)
    return told.read_text().split("\n")


def test_kill_and_go_on_from_the_latest_checkpoint(tmp_path: Path) -> None:
    """Killed three times, in the middle of whatever it did: every iteration has whole files, all of the life whose row
    counts; the curve has one value a step; TensorBoard shows that curve, and one histogram an iteration, of that life."""
    starts = []
    for life, kill_after in enumerate((7, 4, 8, None)):
        starts.append(int(train(tmp_path, life, kill_after)[0].removeprefix("start ")))
    assert starts == sorted(starts)
    assert 0 == starts[0] < starts[1] < starts[3]

    view = runmirror.read_run(tmp_path / "run")
    table = view.metrics(["life", "env/all/reward/total"])
    assert table["step"] == list(range(ITERATIONS))
    lives = table["life"]
    assert table["env/all/reward/total"] == lives
    assert lives[-1] == 3
    for i, life in enumerate(lives):
        text = f"life {life} iteration {i}"
        assert [record["total_reward"] for record in view.rollouts(i)] == [life] * 3
        assert {message["content"] for one in view.conversations(i) for message in one.messages} == {text}
        page = (tmp_path / "run" / file_name("report", "train", i)).read_text()
        assert (page.count(text), page.endswith("</body>\n</html>\n")) == (120, True)

    summary = import_runs([tmp_path / "run"], "tensorboard", {"logdir": str(tmp_path / "tb")})
    assert summary.ok
    assert runmirror.verify([tmp_path / "run"], "tensorboard", {"logdir": str(tmp_path / "tb")}).ok
    shown = histograms(tmp_path / "tb/run", REWARDS)
    assert sorted(shown) == list(range(ITERATIONS))
    assert {step: buckets[0][:2] for step, buckets in shown.items()} == {
        step: [life - 0.5, life + 0.5] for step, life in enumerate(lives) if isinstance(life, int)
    }
    assert all(counts(buckets) == 3 for buckets in shown.values())
    assert json.loads((tmp_path / "run/.runmirror/run.json").read_bytes())["run_id"] == view.run_id
