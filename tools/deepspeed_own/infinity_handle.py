"""A pytest plugin under which DeepSpeed's own tests meet infinity's I/O handle, also in the processes that they start."""

import multiprocessing
from types import SimpleNamespace

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.io import fast_file_writer

from infinity.integrations.deepspeed import install

install()
multiprocessing.set_forkserver_preload([__name__])  # whose processes import nothing of this one's
if get_accelerator().device_name() == "cpu":  # for which DeepSpeed lacks an op that its writer loads
    op = SimpleNamespace(cast_to_byte_tensor=lambda tensor: tensor.reshape(-1).view(torch.uint8))
    fast_file_writer.UtilsBuilder = lambda: SimpleNamespace(load=lambda: op)
