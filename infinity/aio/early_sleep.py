"""OpenMP threads that sleep as soon as they have nothing to do, instead of spinning. One thread at a time."""

from __future__ import annotations

import os

import torch

from infinity._aio import EarlySleep

_SAID_IN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Of the environment: how idle threads wait, in the user's own words."""

_CPUS = len(os.sched_getaffinity(0))
"""As many as the runtime, which was loaded with torch, has found."""

_CPUS_MAX = 16
"""Where more threads are to be woken for each operation, nobody has measured what that takes."""


def start_early_sleep() -> EarlySleep | None:
    """Until its `end`, torch's OpenMP threads of this process sleep whenever they are idle.

    None where there is one thread only, where there are more than 16 CPUs, or where the environment says how threads wait.
    """
    if torch.get_num_threads() == 1 or _CPUS > _CPUS_MAX or any(name in os.environ for name in _SAID_IN):
        return None
    return EarlySleep(max(2, _CPUS))
