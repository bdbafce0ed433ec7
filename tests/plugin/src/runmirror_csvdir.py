"""A folder of CSV files: one per run, a line per row with its metrics as JSON."""

import csv
import json
import re
from pathlib import Path

from pydantic import Field

from runmirror.sinks.base import Capabilities, Opened, Point, SinkOptions


class CsvDirOptions(SinkOptions):
    folder: str = Field(default="csv", description="where the files go")


class CsvDir:
    name = "csvdir"
    Options = CsvDirOptions
    capabilities = Capabilities()

    def __init__(self, options):
        self.folder = Path(options.folder).absolute()

    def destination(self):
        return str(self.folder)

    def _path(self, run):
        return self.folder / (re.sub(r"\W", "_", run.run_id) + ".csv")

    def open(self, run, tracker_run_id):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self._path(run)
        self.path.touch()
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")  # a crash may have torn the last line
        if torn:
            self.path.write_bytes(whole + b"\n" if whole else b"")
        self.rows = self.path.read_bytes().count(b"\n")  # the file is the position: a line is a row
        return Opened(str(self.path), self.path.stem, self.rows)

    def put(self, rows):
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [row.step, row.time, json.dumps(row.scalars())] for row in rows
            )
        self.rows += len(rows)
        return []

    def put_file(self, file):
        pass

    def flush(self, deadline):
        return self.rows

    def close(self, run, deadline):
        pass

    def read_back(self, run, tracker_run_id):
        if not self._path(run).exists():
            return None
        with self._path(run).open(newline="") as file:
            lines = [(int(step), float(time), json.loads(points)) for step, time, points in csv.reader(file)]
        return (Point(key, step, time, value) for step, time, points in lines for key, value in points.items())
