"""Tests of the integrations use the fixtures of the repository's own."""

from tests.conftest import _clean_environment, samples

__all__ = ["_clean_environment", "samples"]
