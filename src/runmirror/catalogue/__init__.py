"""What the metrics of RL training mean, and whether a run is healthy.

The metrics are data, one file per framework (``trl-ppo.toml``, ``trl-grpo.toml``, ``tinker-rl.toml``), with patterns for
keys that have names in them. :func:`describe` tells what a key means; :func:`check_runs` what is wrong with runs.
"""

from __future__ import annotations

from runmirror.catalogue.entries import Catalogue, best, describe
from runmirror.catalogue.findings import Finding
from runmirror.catalogue.models import Description
from runmirror.catalogue.runs import RunHealth, check_runs

__all__ = ["Catalogue", "Description", "Finding", "RunHealth", "best", "check_runs", "describe"]
