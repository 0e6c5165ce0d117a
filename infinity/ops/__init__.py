"""Floor 14. `ops` as scripts written for DeepSpeed use it: `infinity.ops.adam`."""

from infinity.ops import adam

__all__ = ["adam"]
