"""Floor 3. OpenMP threads that sleep as soon as they have nothing to do, instead of spinning. Any thread."""

from __future__ import annotations

import os

import torch

from infinity._aio import EarlySleep

_SAID_IN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Of the environment: how idle threads wait, in the user's own words."""


def start_early_sleep() -> EarlySleep | None:
    """Until its `end`, torch's OpenMP threads on this process's CPUs sleep whenever they are idle.

    None where there is one thread only, or the environment says how they wait.
    """
    team = torch.get_num_threads()
    if team == 1 or any(name in os.environ for name in _SAID_IN):
        return None
    # One more than CPUs, in all: see [Note: Early sleep] in csrc/base/openmp.h. The first of them is nobody's team.
    return EarlySleep(max(2, len(os.sched_getaffinity(0)) - team + 2))
