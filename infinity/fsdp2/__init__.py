"""Everything that knows FSDP2: what it shards and gathers, under which names, and its levers."""

import torch

from infinity.torch_versions import why_too_old

if (_why := why_too_old(torch.__version__)) is not None:  # before a module here asks for what that torch doesn't have
    raise ImportError(_why)
