"""Where runmirror keeps what can't lie in a log_path: state of foreign logs, and the spools of cloud ones."""

from __future__ import annotations

import getpass
import logging
import os
import re
import tempfile
from pathlib import Path

import platformdirs

from runmirror.exceptions import StateError

log = logging.getLogger("runmirror")
_warned: set[str] = set()
"""Folders that could not be written, each named once."""


def home() -> Path:
    """The folder for state that can't live in a log_path: ``RUNMIRROR_HOME``, else the user's state directory, else (when
    that can't be written) a per-user temporary folder, with a warning.

    Raises:
        StateError: none of them can be written.
    """
    wanted = Path(os.environ.get("RUNMIRROR_HOME") or platformdirs.user_state_path("runmirror"))
    try:
        folder = wanted.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: "~" of a user without a home
        pass
    spare = spare_home()
    try:
        spare.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and spare.lstat().st_uid != os.getuid():
            raise PermissionError(f"{spare} belongs to someone else")
    except OSError as error:
        raise StateError(
            f"no folder for state: {wanted} and {spare} can't be written ({error}); set RUNMIRROR_HOME"
        ) from error
    if str(wanted) not in _warned:
        _warned.add(str(wanted))
        log.warning(
            "state goes to %s, which may not outlive a reboot: %s can't be written; set RUNMIRROR_HOME", spare, wanted
        )
    return spare


def homes() -> list[Path]:
    """Every folder that :func:`home` may have returned, for reading; none is made."""
    wanted = os.environ.get("RUNMIRROR_HOME") or platformdirs.user_state_path("runmirror")
    return [Path(os.path.abspath(os.path.expanduser(wanted))), spare_home()]


def spare_home() -> Path:
    """The per-user temporary folder of last resort."""
    return Path(tempfile.gettempdir()) / f"runmirror-{_user()}"


def _user() -> str:
    try:
        return re.sub(r"\W", "_", getpass.getuser())
    except (OSError, KeyError):  # a container user without a name
        return str(os.getuid()) if hasattr(os, "getuid") else "user"
