"""The only folder that knows FSDP2: its groups, parameter names, hooks and settings."""

import os

import torch

from infinity.torch_versions import ANYWAY, why_too_old

# Check first: the modules of this folder import names that an older torch lacks.
if (_why := why_too_old(torch.__version__)) is not None and os.environ.get(ANYWAY) != "1":
    raise ImportError(f"{_why}, or set {ANYWAY}=1 to try this one")
