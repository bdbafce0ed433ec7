"""Finding runs below a cloud URI, all by one listing."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from runmirror.log import layout, trainer
from runmirror.log.listed import Listed
from runmirror.storage import Stat, Storage, spools, storage_from_uri

Place = tuple[str, str]
"""A run's folder below the root, and the name of its metrics file."""


def is_remote(path: str) -> bool:
    """Whether a path is a URI of another place than this machine."""
    return "://" in path and not path.startswith("file:")


class Tree:
    """The runs below one URI, listed again and again; each stays one :class:`~runmirror.log.listed.Listed`.

    Args:
        uri: a run, a metrics file (``*.jsonl``), a folder that is searched in depth, or a glob. A name that is there is never
            taken for a glob.
        options: for the file system.
        max_depth: folders below ``uri`` that are searched.

    Raises:
        ValueError: no such scheme, no bucket, or credentials in the URI.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None, max_depth: int) -> None:
        self.uri = uri.rstrip("/").removesuffix(f"/{layout.METRICS}")
        self._options = dict(options or {})
        self._depth = max_depth
        self._runs: dict[Place, Listed] = {}
        self._spools: dict[str, Storage] = {}
        self._fixed_root: Storage | None = None
        folder, _, name = self.uri.rpartition("/")
        self._file = name if name.endswith(".jsonl") else ""
        parts = self.uri.split("/")
        magic = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        if magic <= 2:
            raise ValueError(f"{uri}: the bucket can't be a glob")
        self._fixed = "/".join(parts[:magic])
        self._pattern = "/".join(parts[magic:])
        self._root = storage_from_uri(folder if self._file else self.uri, **self._options)
        self.trainers = False
        """Whether the last listing had runs of transformers in it."""

    def find(self) -> list[tuple[str, str, str, Listed]]:
        """(URI, name, metrics file, view) of every run that is there now, sorted. One listing; two for a glob.

        Raises:
            OSError: the place can't be listed.
        """
        spooled = self._spooled()
        root, top = self._root, self.uri
        entries = _list(root) if top not in spooled else {}  # the network may be down
        places = [("", self._file)] * (self._file in entries) if self._file else self._folders(entries)
        places += [(url[len(top) + 1 :], layout.METRICS) for url in spooled if url == top or url.startswith(f"{top}/")]
        places = list(dict.fromkeys(places))
        if not places and self._pattern:
            self._fixed_root = self._fixed_root or storage_from_uri(self._fixed, **self._options)
            root, top = self._fixed_root, self._fixed
            entries = _list(root)
            match = re.compile(_pattern(self._pattern) + ("" if self._file else "(/.*)?"))
            if self._file:
                split = [path.rpartition("/") for path in entries if match.fullmatch(path)]
                places = [(folder, name) for folder, _, name in split]
            else:
                places = [place for place in self._folders(entries) if match.fullmatch(place[0])]
        own = _shared_out(entries, {folder for folder, _ in places})
        for gone in self._runs.keys() - set(places):
            self._runs[gone].update({})
        for place in places:
            folder, metrics = place
            view = self._runs.setdefault(place, Listed(root, folder, {}, partial(self._relist, root, place)))
            view.update(own[folder])
            view.live = spooled.get(view.url()) if metrics == layout.METRICS else None
        return [_named(self._runs[place], place[1], top) for place in sorted(places)]

    def _spooled(self) -> dict[str, Storage]:
        """URI -> how to read it, of the runs at or below the fixed part that this machine writes, or has not uploaded yet."""
        urls = {info.url for info in spools() if not info.taken_by and (info.alive or info.unsynced)}
        for url in urls - self._spools.keys():
            if url == self._fixed or url.startswith(f"{self._fixed}/"):
                self._spools[url] = storage_from_uri(url, **self._options)
        found = {url: storage for url, storage in self._spools.items() if url in urls}
        return {
            url: storage
            for url, storage in found.items()  # an event file's folder has a spool too
            if any(storage.stat(path) is not None for path in (layout.METRICS, layout.RUN))
        }

    def _folders(self, entries: Iterable[str]) -> list[Place]:
        """The runs among these files; a run's own folder has no other runs below it."""
        folders = {folder for folder in map(_run_folder, entries) if folder is not None and self._searched(folder)}
        self.trainers = any(path.endswith(trainer.STATE) for path in entries)
        return [(folder, layout.METRICS) for folder in ({""} if "" in folders else folders)]

    def _searched(self, folder: str) -> bool:
        names = folder.split("/") if folder else []
        return len(names) <= self._depth and not any(name[:1] == "." or layout.is_iteration(name) for name in names)

    def _relist(self, root: Storage, place: Place) -> None:
        self._runs[place].update(_list(root, place[0]))


def _list(root: Storage, folder: str = "") -> dict[str, Stat]:
    cut = len(folder) + 1 if folder else 0
    return {entry.path[cut:]: entry.stat for entry in root.scan(folder)}


def _shared_out(entries: dict[str, Stat], folders: set[str]) -> dict[str, dict[str, Stat]]:
    """folder -> what is in it, less what is in a run below it."""
    own: dict[str, dict[str, Stat]] = {folder: {} for folder in folders}
    for path, stat in entries.items():
        folder = path
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in own:
                own[folder][path[len(folder) + 1 if folder else 0 :]] = stat
                break
    return own


def _named(view: Listed, metrics: str, top: str) -> tuple[str, str, str, Listed]:
    uri = view.url() if metrics == layout.METRICS else view.url(metrics)
    name = uri[len(top) + 1 :] if uri.startswith(f"{top}/") else uri.rpartition("/")[2]
    return uri, name if metrics == layout.METRICS else name.removesuffix(".jsonl"), metrics, view


def _run_folder(path: str) -> str | None:
    """The run that a file is the mark of."""
    for mark in (layout.METRICS, layout.RUN):
        if path == mark:
            return ""
        if path.endswith(f"/{mark}"):
            return path[: -len(mark) - 1]
    return None


def _pattern(pattern: str) -> str:
    """A glob as a regular expression: ``*`` stays in a folder, ``**`` does not."""
    parts: list[str] = []
    for part in pattern.split("/"):
        if part == "**":
            parts.append("(?:[^/]+/)*")
            continue
        text = re.escape(part).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
        parts.append(re.sub(r"\\\[(\\?!)?(.*?)\\\]", lambda m: f"[{'^' if m[1] else ''}{m[2]}]", text) + "/")
    return "".join(parts).removesuffix("/")
