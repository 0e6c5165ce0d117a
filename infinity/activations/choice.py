"""Floor 9. Where saved activations go: which store, of what device and drives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from infinity.activations.saved_tensors import Activations
from infinity.activations.stores import ActivationStore, ArenaActivationStore, HostActivationStore
from infinity.device import HostBuffers, device_for
from infinity.swap import SwapManager


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Where what a forward saves is kept until its backward."""

    device: str
    """"none" leaves it where it is; "cpu" is host memory, "nvme" the drives on which the model rests."""
    bytes_min: int
    """Tensors of fewer bytes stay where they are."""
    host_bytes_max: int | None
    """At most so many bytes of host memory, with "cpu". None is no bound."""
    pin_memory: bool
    """Whether that memory is registered with the GPU."""


def make_activations(
    options: ActivationOptions, swap: SwapManager | None, torch_device: torch.device
) -> tuple[Activations | None, list[str]]:
    """What moves saved activations, or None where nothing does; and notes. "nvme" takes a model that `swap` pages."""
    if options.device == "none":
        return None, []
    device = swap.paging.device if swap is not None else device_for(torch_device)
    if options.device == "cpu" and not device.is_discrete:
        return None, ["activations in host memory are where they are anyway: the CPU is the device that computes"]
    store: ActivationStore
    if options.device == "nvme":
        assert swap is not None
        store = ArenaActivationStore(*swap.paging.activation_buffers())
    else:
        store = HostActivationStore(
            device, HostBuffers(device, pin=options.pin_memory, bytes_max=options.host_bytes_max)
        )
    return Activations(store, bytes_min=options.bytes_min), []
