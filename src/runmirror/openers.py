"""Opening files in folders that someone else may have made: nothing is waited for, and no link leads out unseen."""

from __future__ import annotations

import errno
import os
import stat as modes
from io import FileIO
from pathlib import Path


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """A file for reading. Raises FileNotFoundError also for what is no regular file (a pipe, a device)."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if modes.S_ISREG(mode):
        return FileIO(descriptor)
    os.close(descriptor)
    if modes.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise FileNotFoundError(errno.ENOENT, "No regular file", os.fspath(path))


def follow_no_link(path: str, flags: int) -> int:
    """An opener for ``open``: OSError where the file is a symbolic link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def leads_out(root: str, path: str) -> bool:
    """Whether a symbolic link on the way from the folder ``root`` to the file ``path`` below it leads out of ``root``. In
    Hugging Face's cache, the files of ``snapshots/<revision>`` may be links to ``blobs``."""
    parts = path.split("/")
    if not any(os.path.islink(os.path.join(root, *parts[:count])) for count in range(1, len(parts) + 1)):
        return False
    top, target = Path(os.path.realpath(root)), Path(os.path.realpath(os.path.join(root, path)))
    in_cache = top.parent.name == "snapshots" and target.is_relative_to(top.parent.parent / "blobs")
    return not (in_cache or target.is_relative_to(top))


def has_links(folder: str | os.PathLike[str]) -> bool:
    """Whether anything in a folder, in depth, is neither a regular file nor a folder. Raises OSError."""
    with os.scandir(folder) as listing:
        return any(map(_is_link, listing))


def _is_link(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return has_links(entry.path)
    return not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path)  # a temporary file may be gone
