"""For tests of code that uses runmirror, and of sinks.

- :class:`MemorySink`: a tracker in memory that keeps every row it was put.
- :class:`DummySink`: a tracker that is a file, with the faults of real ones at given probabilities; the sink ``dummy``.
- :mod:`runmirror.testing.conformance`: the tests every sink passes. It is imported by name only, so that pytest can
  rewrite its assertions.
"""

from __future__ import annotations

from runmirror.testing.dummy import DummyOptions, DummySink
from runmirror.testing.memory import MemoryOptions, MemoryRun, MemorySink

__all__ = ["DummyOptions", "DummySink", "MemoryOptions", "MemoryRun", "MemorySink"]
