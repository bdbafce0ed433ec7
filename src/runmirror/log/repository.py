"""The user's code as a run found it: its git repository against HEAD.

Guarantees:

- :func:`code_diff` never raises: without git, outside a repository, at a deadline it says so in one line.
- git runs without prompts, pagers, colours, lazy fetches or the programs a configuration names for diffs, takes no
  lock, and is ended after GIT_SECONDS.
- Paths are relative to the repository. Its absolute path, remotes, host and user names are left out; secrets masked.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from runmirror.log.masking import mask_text

GIT_SECONDS = 10.0
MAX_UNTRACKED = 200


def code_diff(folder: str | os.PathLike[str] | None = None, *, limit: int = 1_000_000) -> str:
    """``code.diff``: the repository around ``folder`` against its HEAD, staged and unstaged, below a short header.

    The header's lines are ``commit:``, ``branch:``, ``dirty: yes`` or ``no``, one ``untracked:`` per new file (its name
    only) and ``note:`` for what was left out. A blank line ends it; the diff follows, at most ``limit`` bytes of it.

    Args:
        folder: default the main script's folder, else the working directory.
        limit: largest size of the diff in bytes.
    """
    header: list[str] = []
    diff = b""
    deadline = time.monotonic() + GIT_SECONDS
    try:
        folders = [Path(folder)] if folder is not None else _own_folders()
        place, state = _status(folders, deadline)
        commit, dirty = _read_status(state, header)
        if dirty:
            base = commit or _git(place, deadline, "hash-object", "-t", "tree", "--stdin")[0].decode().strip()
            diff, cut = _git(place, deadline, "diff", *_DIFF, base, "--", limit=limit + 4_000_000)
            diff = _SAME.sub(b"", diff)
            if cut or len(diff) > limit:
                diff = diff[: diff.rfind(b"\n", 0, limit) + 1]
                header.append(f"note: the diff is longer than {limit} bytes and was cut")
    except _GitError as error:
        header.append(f"note: {error}")
    except Exception as error:  # the code is an extra: whatever is wrong with it must not stop a training
        header.append(f"note: the code could not be read ({type(error).__name__})")
    return mask_text("\n".join(header) + "\n" + ("\n" if diff else "") + diff.decode("utf-8", "replace"))


def parse_code_header(text: str) -> dict[str, str | bool]:
    """What the header of a code.diff tells: ``commit``, ``branch`` and ``dirty``, each only when it is known.

    Also reads tinker-cookbook's ``### repo: <root> @ <commit>``.
    """
    found: dict[str, str | bool] = {}
    foreign = re.search(r"^### repo: .* @ ([0-9a-f]{7,64})$", text, re.MULTILINE)
    if foreign:
        return {"commit": foreign[1], "dirty": re.search(r"^diff --", text, re.MULTILINE) is not None}
    for line in itertools.takewhile(str.strip, text.split("\n")):
        name, _, value = line.partition(": ")
        value = value.strip()
        if name in ("commit", "branch") and value not in ("", "none"):
            found[name] = value
        elif name == "dirty" and value in ("yes", "no"):
            found[name] = value == "yes"
    return found


class _GitError(Exception):
    """Why there is no diff, in words for the header."""


_CONFIG = (
    *("core.quotepath=off", "core.fsmonitor=false", "color.ui=false", "diff.relative=false"),
    *("diff.interHunkContext=0", "diff.autoRefreshIndex=false"),
)
_DIFF = (
    *("--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "--unified=3"),
    *("--submodule=short", "--diff-algorithm=default", f"-O{os.devnull}"),
)
_SAME = re.compile(rb"^diff --git [^\n]*\n(?=diff --git |\Z)", re.MULTILINE)
"""What git prints, without its refresh of the index, for a file that was touched and is the same."""
_KEPT = ("GIT_CONFIG", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH")


def _own_folders() -> list[Path]:
    """Where the user's code may be: the folder of the main script unless that is installed, the working directory."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    places = [Path(os.path.abspath(script)).parent] if script else []
    return [*(place for place in places if not place.is_relative_to(sys.prefix)), Path.cwd()]


def _status(folders: Sequence[Path], deadline: float) -> tuple[Path, bytes]:
    """The first of the folders that is in a repository, and what ``git status`` says of it."""
    for place in folders[:-1]:
        with contextlib.suppress(_GitError):
            return place, _git(place, deadline, "status", *_STATUS)[0]
    return folders[-1], _git(folders[-1], deadline, "status", *_STATUS)[0]


_STATUS = ("--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--no-renames")


def _read_status(state: bytes, header: list[str]) -> tuple[str, bool]:
    """Add the header's lines; returns the commit, "" when there is none yet, and whether anything differs from it."""
    entries = state.decode("utf-8", "replace").split("\0")[:-1]
    facts = dict(entry[2:].split(" ", 1) for entry in entries if entry.startswith("# "))
    commit, branch = facts.get("branch.oid", ""), facts.get("branch.head", "")
    commit, branch = ("" if value.startswith("(") else value for value in (commit, branch))
    dirty = any(entry[:2] in ("1 ", "2 ", "u ") for entry in entries)
    new = [re.sub(r"[\x00-\x1f\x7f]", "?", entry[2:]) for entry in entries if entry.startswith("? ")]
    header += [f"commit: {commit or 'none'}", f"branch: {branch or 'none'}", f"dirty: {'yes' if dirty else 'no'}"]
    header += [f"untracked: {name}" for name in new[:MAX_UNTRACKED]]
    if len(new) > MAX_UNTRACKED:
        header.append(f"note: {len(new) - MAX_UNTRACKED} more untracked files")
    return commit, dirty


def _git(place: Path, deadline: float, *arguments: str, limit: int = 8_000_000) -> tuple[bytes, bool]:
    """What a git command prints, at most ``limit`` bytes, and whether there was more."""
    if not place.is_dir():
        raise _GitError("the folder of the code doesn't exist")
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_" or name.startswith(_KEPT)}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    command = ["git", "--no-pager", *(part for setting in _CONFIG for part in ("-c", setting)), *arguments]
    with tempfile.TemporaryFile() as complaints:
        try:
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise _GitError("git is not installed") from None
        timer = threading.Timer(max(deadline - time.monotonic(), 0), _kill, [process])
        timer.daemon = True
        timer.start()
        try:
            with process:
                printed = process.stdout.read(limit + 1) if process.stdout else b""
                if len(printed) > limit:
                    _kill(process)
        finally:
            timer.cancel()
        if len(printed) > limit:
            return printed[:limit], True
        if process.returncode:
            complaints.seek(0)
            raise _GitError(_reason(complaints.read(10_000), deadline))
        return printed, False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End git with what it started: asked first, so that it leaves nothing behind, then at once."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, number)
                process.wait(1)


def _reason(complaint: bytes, deadline: float) -> str:
    if time.monotonic() >= deadline:
        return f"git took longer than {GIT_SECONDS:g} s"
    if b"not a git repository" in complaint or b"in a work tree" in complaint:
        return "not in a git repository"
    if b"dubious ownership" in complaint:
        return "git doesn't trust the owner of this repository (git config --global --add safe.directory PATH)"
    return "git failed"
