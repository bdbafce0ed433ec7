"""The oldest wandb that is supported passes the sink's tests of wandb too; the newest is what the other tests run with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = re.findall(r'"wandb>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
SINK = re.findall(
    r"\S+",
    """
    test_a_row_is_a_row test_text_goes_to_the_summary_where_no_number_has_its_name test_a_large_row_and_many_keys
    test_a_resumes_config_changes_nothing_and_is_told test_every_shape_of_log_arrives_whole
    test_a_log_that_is_cut_and_grows test_a_404_moves_nothing test_a_replay_from_zero_is_harmless
    test_two_states_reach_one_run test_two_runs_in_turns test_the_best_value_is_in_the_summary_when_asked
    test_nothing_is_littered test_missing_credentials_are_named
    test_init_refused_or_silent_costs_one_run[fault0] test_a_core_that_was_left_is_ended
    test_a_lost_mirror_takes_all_with_it
    """,
)
CONFORMANCE = re.findall(
    r"\S+",
    """
    test_a_new_run_is_empty test_goes_on_after_a_close test_goes_on_after_a_crash test_files_are_sent_once_per_version
    test_any_key_arrives_or_is_refused_by_name test_nonfinite_values_are_kept_as_stated test_final_numbers_are_shown
    test_extreme_values_keep_the_stated_precision test_times_are_those_of_the_rows test_leaves_the_process_as_it_was
    """,
)
TESTS = [f"tests/sinks/test_wandb.py::{name}" for name in SINK]
TESTS += [f"tests/sinks/test_wandb_conformance.py::TestWandbSink::{name}" for name in CONFORMANCE]
"""What goes by what wandb does: its settings, resuming, keys, values, summary, files, errors, processes. What is left out is
our own work around it (batches, order, names, runs side by side), or waits for wandb's retries."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_oldest_wandb(pytestconfig: pytest.Config) -> None:
    """In a folder of its own, kept for the next time; skipped where it can't be installed."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"wandb-{OLDEST}-py{sys.version_info[0]}{sys.version_info[1]}")
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            "--target",
            str(folder),
            f"wandb=={OLDEST}",
        ]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"wandb {OLDEST} can't be installed here: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    which = [sys.executable, "-c", "import wandb; print(wandb.__version__)"]
    assert subprocess.run(which, env=environment, capture_output=True, text=True, check=True).stdout.strip() == OLDEST
