"""The tests every sink passes: what :mod:`runmirror.sinks.base` asks, and what a mirror promises through it.

::

    class TestMySink(SinkConformance):
        def make_sink(self, folder: Path) -> Sink: ...
        def read(self, sink: Sink, run: RunInfo) -> list[Point]: ...  # unless the sink has read_back()

``make_sink`` called again with one folder makes a sink for the same place in the tracker, as a restarted process does.
Override ``read_files`` to have files checked too. To see the values in failed assertions, say
``pytest.register_assert_rewrite("runmirror.testing.conformance")`` in conftest.py. This module doesn't import pytest.
"""

from __future__ import annotations

from runmirror.sinks.base import Point
from runmirror.testing.conformance.base import a_file, a_row, a_run, rows, write_log
from runmirror.testing.conformance.positions import PositionTests
from runmirror.testing.conformance.runs import RunTests
from runmirror.testing.conformance.values import ValueTests

__all__ = ["Point", "SinkConformance", "a_file", "a_row", "a_run", "rows", "write_log"]


class SinkConformance(PositionTests, ValueTests, RunTests):
    """Inherit, name the class ``Test...``, and say how the sink is made and its tracker read."""
