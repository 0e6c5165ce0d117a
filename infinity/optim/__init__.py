"""Optimizer arithmetic: changes tensors in place, without knowledge of where they come from."""

from infinity.optim.adam import AdamSettings, adam_

__all__ = ["AdamSettings", "adam_"]
