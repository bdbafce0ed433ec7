"""What the package promises as a whole: light import, a tidy tree, tested documentation."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import runmirror
from runmirror.cli import app
from runmirror.sinks.registry import installed_sinks
from tests.logs import flat_log

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
HEAVY = ("tensorboard", "google", "numpy", "pandas", "wandb", "mlflow", "gcsfs", "s3fs", "fsspec", "torch", "pydantic")


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_import_loads_no_tracker_and_no_cloud_library() -> None:
    """None of them, and no array library, after ``import runmirror``; still no tracker after using ``start``."""
    assert not loaded("import runmirror") & set(HEAVY)
    assert not loaded("import runmirror; runmirror.start") & (set(HEAVY) - {"pydantic"})
    parse = "from runmirror.targets import parse_report_to; parse_report_to('tensorboard,all')"
    assert not loaded(parse) & (set(HEAVY) - {"pydantic"})


def test_every_public_name_is_there_and_documented() -> None:
    """Each name of ``__all__`` resolves, has a docstring, and stands in the README."""
    for name in runmirror.__all__:
        thing = getattr(runmirror, name)
        if not name.startswith("__"):
            assert inspect.getdoc(thing), name
    for name in ("start", "import_runs", "plan"):
        assert f"runmirror.{name}(" in README, name
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        runmirror.nope  # noqa: B018


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_every_command_option_and_sink_is_in_the_readme() -> None:
    """A command, an option or a sink that the README doesn't name is one that nobody finds."""
    missing = []
    for name, command in commands().items():
        missing += [] if f"runmirror {name}" in README else [name]
        for parameter in command.params:
            names = [option for option in parameter.opts + parameter.secondary_opts if option.startswith("-")]
            missing += [] if not names or any(f"`{option}" in README for option in names) else [f"{name} {names}"]
    missing += [sink for sink in installed_sinks() if f"`{sink}`" not in README]
    assert missing == []


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", README)


@pytest.mark.slow
def test_python_of_the_readme_runs(tmp_path: Path) -> None:
    """Every Python block, in order, in one folder, without a warning."""
    environment = os.environ | {"RUNMIRROR_QUIET": "1"}
    flat_log(tmp_path / "runs" / "old")
    assert blocks("python")
    for block in blocks("python"):
        command = [sys.executable, "-c", block]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), block


@pytest.mark.slow
def test_shell_of_the_readme_runs(tmp_path: Path) -> None:
    """Every shell block but the two that set up an environment, which CI runs."""
    flat_log(tmp_path / "runs" / "old")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(tmp_path), "PATH": path}
    ran = [block for block in blocks("bash") if "venv" not in block]
    assert ran
    for block in ran:
        command = ["bash", "-euc", block]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (block, done.stderr)


def test_the_tree_is_tidy() -> None:
    """Top level: only what the project allows. No source file over 450 lines."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = listed.stdout.splitlines()
    allowed = {"pyproject.toml", "src", "tests", "integrations", "README.md", "CHANGELOG.md", "LICENSE"}
    top = {name for name in (path.partition("/")[0] for path in files) if not name.startswith(".")}
    assert top <= allowed
    long = {
        path: len((ROOT / path).read_text().splitlines())
        for path in files
        if path.startswith("src/")
        if path.endswith(".py")
    }
    assert {path: length for path, length in long.items() if length > 450} == {}


def test_nothing_is_printed_from_the_library() -> None:
    """``print(`` stands in the command line only."""
    found = [
        path.name
        for path in (ROOT / "src").rglob("*.py")
        if path.parent.name != "cli"
        if re.search(r"(?m)^\s*print\(", path.read_text())
    ]
    assert found == []
