"""Optimizer arithmetic only: tensors in, tensors changed in place; where they come from is not known here."""

from infinity.optim.adam import AdamSettings, adam_

__all__ = ["AdamSettings", "adam_"]
