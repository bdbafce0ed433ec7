"""What sinks and the doctor look at alike. Nothing is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from runmirror.sinks.base import Check

LEAST_FREE = 500_000_000
"""Free bytes below which a disk is a problem."""


def existing(folder: Path) -> Path:
    """``folder``, or the nearest folder above it that is there."""
    folder = folder.absolute()
    while not os.path.exists(folder) and folder != folder.parent:  # unlike Path.exists, never an error
        folder = folder.parent
    return folder


def check_folder(name: str, folder: Path, instead: str) -> Check:
    """Whether a folder can be written, or be made and then written. ``instead`` says what else to use."""
    place = existing(folder)
    if not os.path.isdir(place):
        return Check(name, False, f"{place} is a file", f"move it away, or use {instead}")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(name, False, f"{place} can't be written", f"chmod u+wx {place}, or use {instead}")
    return Check(name, True, f"{folder} {'can be written' if place == folder else 'can be made'}")


def check_disk(name: str, folder: Path) -> Check:
    """Whether the disk of a folder has room."""
    free = shutil.disk_usage(existing(folder)).free
    fix = f"make room on the disk of {folder}: {LEAST_FREE / 1e6:.0f} MB at least"
    return Check(name, free >= LEAST_FREE, f"{free / 1e9:,.1f} GB free for {folder}", "" if free >= LEAST_FREE else fix)
