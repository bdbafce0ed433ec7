"""Virtual environments with other packages than the tests' own, kept between runs below pytest's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock


def venv_with(cache: Path, name: str, *installs: tuple[str, ...]) -> str:
    """The interpreter of a virtual environment in which ``pip install`` was run with each of ``installs``.

    It is made once, below ``cache``. Skips the test when pip can't.
    """
    mark = hashlib.sha256(repr((installs, sys.version)).encode()).hexdigest()[:8]
    folder = cache / f"{name}-{mark}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=280):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
            for arguments in installs:
                command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
                command += ["--disable-pip-version-check", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, env=_environment())
                if done.returncode:
                    pytest.skip(f"pip can't install {' '.join(arguments)}: {done.stderr.strip()[-300:]}")
            (folder / "complete").touch()
    return str(python)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
