"""A sink of another package: installed by pip, found by its entry point, tested by the suite, and broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.logs import flat_log

PLUGIN = Path(__file__).parent / "plugin"
Environment = dict[str, str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the plugin, built from its source without a network."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def run(*command: str | Path, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"}
    line = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


def broken_plugin(site: Path, name: str, code: str) -> None:
    """A package as pip leaves it, with a sink ``name`` whose module is ``code``."""
    (site / f"runmirror_{name}.py").write_text(code)
    folder = site / f"runmirror_{name}-0.5.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: runmirror-{name}\nVersion: 0.5\n")
    (folder / "entry_points.txt").write_text(f"[runmirror.sinks]\n{name} = runmirror_{name}:Sink\n")


@pytest.mark.slow
def test_a_plugin_is_found_and_used(installed: Path, tmp_path: Path) -> None:
    """12 rows in its file after an import by its name; nothing more after a second; listed with package and version."""
    flat_log(tmp_path / "runs" / "a")
    for rows in (12, 0):
        done = run("runmirror", "import", "runs", "--to", "csvdir", "--json", site=installed, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["totals"]["rows"] == rows
    (path,) = (tmp_path / "csv").iterdir()
    assert len(path.read_text().splitlines()) == 12
    listed = json.loads(run("runmirror", "sinks", "--json", site=installed, cwd=tmp_path).stdout)
    found = {one["name"]: one for one in listed}
    assert list(found) == ["csvdir", "dummy", "mlflow", "tensorboard", "wandb"]
    assert (found["csvdir"]["package"], found["csvdir"]["version"]) == ("runmirror-csvdir", "1.2.3")
    assert (found["csvdir"]["usable"], found["csvdir"]["built_in"]) == (True, False)
    told = run("runmirror", "sinks", "csvdir", site=installed, cwd=tmp_path).stdout
    assert "  folder: text (default csv)\n      where the files go" in told
    checked = run("runmirror", "doctor", "runs", "--to", "csvdir", site=installed, cwd=tmp_path)
    assert (checked.returncode, "csvdir, of runmirror-csvdir 1.2.3" in checked.stdout) == (0, True)


@pytest.mark.slow
def test_a_plugin_passes_the_suite(installed: Path, tmp_path: Path) -> None:
    """Every inherited test passes, with the assertions as they are, in a pytest of its own."""
    shutil.copy(PLUGIN / "check_csvdir.py", tmp_path)
    options = ["-q", "-p", "no:cacheprovider", "-W", "error", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = run("pytest", *options, "check_csvdir.py", site=installed, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) >= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import a_package_nobody_has", "No module named 'a_package_nobody_has'"),
        ("1 / 0", "ZeroDivisionError"),
        ("class Other: ...", "has no attribute 'Sink'"),
        ("class Sink: name = 'broken'", "lacks Options, capabilities, destination, open, put, put_file, flush, close"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_a_broken_plugin_breaks_only_itself(installed: Path, tmp_path: Path, code: str, told: str) -> None:
    """Named with its error and a fix by `sinks`; using it is one line and exit 1; others work as before."""
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    broken_plugin(site, "broken", code)
    flat_log(tmp_path / "runs" / "a")
    listed = run("runmirror", "sinks", site=site, cwd=tmp_path)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "the sink 'broken' of package runmirror-broken" in listed.stdout
    assert told in listed.stdout
    assert "fix: pip install --upgrade runmirror-broken" in listed.stdout
    used = run("runmirror", "import", "runs", "--to", "broken", site=site, cwd=tmp_path)
    assert (used.returncode, len(used.stderr.splitlines())) == (1, 1)
    assert told in used.stderr
    assert run("runmirror", "import", "runs", "--to", "csvdir", site=site, cwd=tmp_path).returncode == 0


def test_ours_wins_a_clash_of_names(installed: Path, tmp_path: Path) -> None:
    """A package that calls its sink ``tensorboard`` doesn't take the place of ours."""
    site = tmp_path / "site"
    site.mkdir()
    broken_plugin(site, "tensorboard", "1 / 0")
    (one,) = [
        one
        for one in json.loads(run("runmirror", "sinks", "--json", site=site, cwd=tmp_path).stdout)
        if one["name"] == "tensorboard"
    ]
    assert (one["package"], one["usable"]) == ("runmirror", True)
