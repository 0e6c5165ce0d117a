"""DeepSpeed's two Adam classes. Both are torch's fused Adam, paged if the config says so."""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam with fp32 state; weight decay is decoupled (AdamW) unless `adamw_mode` is False.

    Raises ConfigError if `bias_correction` or `fp32_optimizer_states` is False.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not (bias_correction and fp32_optimizer_states):
            raise ConfigError("bias_correction and fp32_optimizer_states must be True: neither can be turned off")
        super().__init__(
            model_params, lr, betas, eps, weight_decay, amsgrad, fused=True, decoupled_weight_decay=adamw_mode
        )


class FusedAdam(DeepSpeedCPUAdam):
    """`DeepSpeedCPUAdam` under the name that DeepSpeed has for GPUs; `set_grad_none` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode=adam_w_mode)
