"""Everything that knows FSDP2: what it shards and gathers, under which names, and its levers."""

import os

import torch

from infinity.torch_versions import ANYWAY, why_too_old

# Before a module here asks for what that torch doesn't have.
if (_why := why_too_old(torch.__version__)) is not None and os.environ.get(ANYWAY) != "1":
    raise ImportError(f"{_why}, or set {ANYWAY}=1 to try this one")
