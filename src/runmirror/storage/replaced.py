"""A file that is replaced under its writer: an editor that saves, ``sed -i``, rsync. What the writer appends goes on into the
old file, which no path leads to any more."""

from __future__ import annotations

import os

from runmirror.openers import open_regular


def is_replaced(descriptor: int, path: str) -> bool:
    """Whether another file, or none, is at ``path`` than the open one."""
    try:
        return not os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def lacking(descriptor: int, path: str) -> bytes | None:
    """What the file at ``path`` lacks of the lines of the open one, and can be appended to it; None when it is not the same
    log (another first line, or no file) or that can't be told (reading the old file takes Linux's ``/proc``)."""
    try:
        with open_regular(path) as file:
            new = file.read()
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            old = file.read()
    except OSError:
        return None
    lines, here = old.split(b"\n"), new.removesuffix(b"\n").split(b"\n")
    if not lines[0] or lines[0] != here[0]:
        return None
    number = {line: n for n, line in enumerate(lines)}
    edited = next(n for n, line in enumerate(reversed(here)) if line in number)  # lines at the end that are new
    rest = b"\n".join(lines[number[here[-1 - edited]] + 1 + edited :])
    return rest if new.endswith(b"\n") else b"\n" + rest
