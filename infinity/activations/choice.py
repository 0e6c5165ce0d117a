"""Floor 9. Where saved activations go, as the config says: which store, of what device and drives."""

from __future__ import annotations

import torch

from infinity.activations.saved_tensors import Activations
from infinity.activations.stores import ActivationStore, ArenaActivationStore, HostActivationStore
from infinity.config import Config
from infinity.device import HostBuffers, device_for
from infinity.swap import SwapManager


def make_activations(
    config: Config, swap: SwapManager | None, torch_device: torch.device
) -> tuple[Activations | None, list[str]]:
    """What moves saved activations, or None where nothing does; and notes."""
    asked = config.infinity.offload_activations
    where = "cpu" if asked.device == "none" and config.activation_checkpointing.cpu_checkpointing else asked.device
    if where == "none":
        return None, []
    device = swap.device if swap is not None else device_for(torch_device)
    if where == "cpu" and not device.is_discrete:
        return None, ["activations in host memory are where they are anyway: the CPU is the device that computes"]
    store: ActivationStore
    if where == "nvme":
        assert swap is not None  # the config says so
        store = ArenaActivationStore(*swap.activation_buffers())
    else:
        bound = None if asked.host_bytes_max == "auto" else asked.host_bytes_max
        blocks = (config.zero_optimization.offload_param, config.zero_optimization.offload_optimizer)
        pin = all(block.pin_memory for block in blocks if block.device != "none")
        store = HostActivationStore(device, HostBuffers(device, pin=pin, bytes_max=bound))
    return Activations(store, bytes_min=asked.bytes_min), []
