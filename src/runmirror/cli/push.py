"""``runmirror push``."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from runmirror.cli import common
from runmirror.cli.common import INCOMPLETE, count, err, errors, out
from runmirror.exceptions import LogBusyError, RunmirrorError
from runmirror.log.masking import mask_text, mask_url
from runmirror.storage import SpoolInfo, push_spool, spools

STUCK = 15.0
"""Seconds without any progress after which an upload is given up."""


def push(
    uris: Annotated[list[str] | None, typer.Argument(help="Only these log_paths; default: all.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Only show what waits on this machine.")] = False,
    storage_option: common.StorageOptions = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Upload what killed or cut-off runs left on this machine's disk. What a living run still writes is left to it."""
    with errors(debug):
        options = common.storage_options(storage_option)
        wanted = {uri.rstrip("/") for uri in uris or ()}
        found = [info for info in spools() if not wanted or info.url in wanted]
        for uri in sorted(wanted - {info.url for info in found}):
            err.print(f"{mask_url(uri)}: nothing of it waits on this machine", markup=False)
        left = 0
        results: list[dict[str, object]] = []
        for info in found:
            error, pushed = "", False
            if not list_only and not info.taken_by:
                try:
                    info, pushed = _push(info, options), True
                except LogBusyError:
                    pass  # its writer lives, and uploads
                except (OSError, RunmirrorError) as failure:
                    if debug:
                        raise
                    error = mask_text(str(failure))
            left += bool(error)
            results.append(asdict(info) | {"folder": str(info.folder), "push_error": error})
            if not as_json:
                out.print(_told(info, error, pushed=pushed), markup=False)
    if as_json:
        print(json.dumps(results, indent=2))  # noqa: T201
    elif not found and not wanted:
        out.print("nothing waits on this machine")
    if left or (not list_only and len(wanted) > len(found)):
        raise typer.Exit(INCOMPLETE)


def _push(info: SpoolInfo, options: dict[str, Any]) -> SpoolInfo:
    """Upload one spool, for as long as it gets on."""
    while True:
        try:
            return push_spool(info, options, timeout=STUCK)
        except TimeoutError:
            now = {one.folder: one for one in spools()}.get(info.folder)
            if now is None or now.unsynced >= info.unsynced:
                raise
            info = now


def _told(info: SpoolInfo, error: str, *, pushed: bool) -> str:
    waiting = f"{count(info.unsynced, 'byte')} ({count(info.pending_files, 'whole file')}) wait"
    if error:
        return f"problem   {info.url}: {error}"
    if pushed and not info.unsynced and not info.pending_files:
        return f"uploaded  {info.url}"
    if info.taken_by:
        return f"kept      {info.url}: {waiting} in {info.folder}; the log_path was taken over by {info.taken_by}"
    who = f"process {info.pid} on {info.host} writes it" if info.alive else "its writer is gone"
    since = f", last upload {time.time() - info.last_upload:.0f} s ago" if info.last_upload else ""
    why = f" ({mask_text(info.error)})" if info.error else ""
    return f"{'writing' if info.alive else 'waiting':9} {info.url}: {waiting} in {info.folder}; {who}{since}{why}"
