"""Which frameworks are there, for tests that need a real one or a stand-in."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path


def installed(package: str, inside: str = "") -> bool:
    """Whether a package is installed, and has a folder or file in it. Nothing is imported; a stand-in doesn't count."""
    spec = PathFinder.find_spec(package)
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / inside).exists()
