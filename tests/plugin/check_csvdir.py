"""The tests a plugin has: those it inherits. Run by tests/test_plugin.py beside the installed package."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("runmirror.testing.conformance")

from runmirror.sinks.base import Sink  # noqa: E402
from runmirror.sinks.registry import make_sink  # noqa: E402
from runmirror.testing.conformance import SinkConformance  # noqa: E402


class TestCsvDir(SinkConformance):
    def make_sink(self, folder: Path) -> Sink:
        return make_sink("csvdir", {"folder": str(folder)})
