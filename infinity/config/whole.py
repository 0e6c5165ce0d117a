"""Floor 1. The whole config: its keys, the contradictions among them, and how they are resolved."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from infinity.config.contradictions import find_contradictions
from infinity.config.resolve import resolve
from infinity.config.top_level import TopLevel


class Config(TopLevel):
    """The whole config. A block that the source leaves out holds its defaults; `optimizer` and `scheduler` are None.

    `communication_data_type`, fp32 or bf16, is read as `infinity.reduce_dtype`; fp16, in which a sum could overflow, is
    ignored.
    """

    def resolve(self, *, world_size: int, hidden_size: int | None = None, **caller: Any) -> Config:
        """A copy with the batch sizes solved and every "auto" filled.

        `caller` fills an "auto" by the name of its key (`lr=3e-4`), or of its block and key where several blocks have
        such a key (`offload_param_device="cpu"`; `bf16=True` for `bf16.enabled`); None counts as not given.
        `hidden_size` (elements) gives the bucket sizes that the caller does not. What nobody fills keeps its default.

        Raises ConfigError when the batch sizes contradict each other or the filled values break a rule, and when
        `caller` has a name that belongs to no key.
        """
        return resolve(self, world_size, hidden_size, caller)

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Config:
        auto = (info.context or {}).get("auto", frozenset())
        if lines := list(find_contradictions(self, auto)):
            raise PydanticCustomError("contradiction", "{lines}", {"lines": "\n".join(lines)})
        return self
