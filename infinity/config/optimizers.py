"""The optimizer and the learning-rate schedules of the config, `{"type": ..., "params": {...}}` in the source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from infinity.config.blocks import Block
from infinity.config.rules import AdjustLrFn, Amount, Beta, Betas, Count, Flag, Positive, Rates, WarmupType, names_of


class AdamConfig(Block):
    """Adam or AdamW, in memory, on the CPU or on NVMe.

    Adam with `adam_w_mode` true, DeepSpeed's default, decouples weight decay and is therefore typed AdamW here; type
    AdamW does so whatever `adam_w_mode` says.
    """

    type: Literal["AdamW", "Adam"] = "AdamW"
    """AdamW decouples weight decay from the gradient (Loshchilov and Hutter, 2019); Adam does not."""
    lr: Amount = 1e-3
    """Learning rate, where no scheduler sets it."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running means of gradient and squared gradient."""
    eps: Amount = 1e-8
    """Added to the denominator."""
    weight_decay: Amount = 0.0
    """Per unit of learning rate. With `torch_adam` true, 0.01 is the default if it is decoupled, as in torch."""
    torch_adam: Flag = False
    """Accepted: the implementation is always torch's. In DeepSpeed: Chooses between torch's and its own."""

    ignored_keys = names_of("capturable cuda_aware foreach fused set_grad_none")
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {
        "amsgrad": (False, "the running maximum of AMSGrad is not kept"),
        "bias_correction": (True, "the update always corrects for bias"),
        "fp32_optimizer_states": (True, "the state is always fp32"),
        "maximize": (False, "losses are minimised"),
    }


class SGDConfig(Block):
    """Stochastic gradient descent, torch's plain loop, in memory, on the CPU or on NVMe."""

    type: Literal["SGD"] = "SGD"
    """Names this optimizer. In DeepSpeed: Any other name of torch.optim is taken too; here pass such an optimizer to
    `initialize`."""
    lr: Amount = 1e-3
    """Learning rate, where no scheduler sets it."""
    momentum: Amount = 0.0
    """Decay of the running sum of gradients; 0 keeps none."""
    dampening: Amount = 0.0
    """Share of each gradient that the running sum leaves out."""
    weight_decay: Amount = 0.0
    """Times the weight, added to its gradient."""
    nesterov: Flag = False
    """Whether the momentum looks ahead; needs `momentum` and no `dampening`."""

    ignored_keys = names_of("differentiable foreach fused torch_adam")
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {"maximize": (False, "losses are minimised")}


class MuonConfig(Block):
    """Muon for matrices, AdamW for the rest, in memory or on NVMe. Needs torch 2.9.

    Matrices are the parameters of two dimensions, but for those with "embed" or "lm_head" in their name. A parameter group that
    says `use_muon` decides for its parameters.
    """

    type: Literal["Muon"] = "Muon"
    """Names this optimizer: `torch.optim.Muon`."""
    lr: Amount = 1e-3
    """Learning rate of both, where no scheduler sets it. In DeepSpeed: 0.02 for matrices, 3e-4 for the rest unless
    set."""
    muon_lr: Amount | None = None
    """Learning rate of the matrices, where it is another one."""
    adam_lr: Amount | None = None
    """Learning rate of the rest, where it is another one."""
    momentum: Amount = 0.95
    """Decay of the running mean of a matrix's gradient."""
    nesterov: Flag = True
    """Whether the momentum looks ahead."""
    ns_steps: Positive = 5
    """Newton-Schulz iterations; fewer than 100."""
    adjust_lr_fn: AdjustLrFn = "original"
    """How the learning rate follows a matrix's shape: as Jordan (2024) has it, or so that updates are as large as
    AdamW's (Liu et al., 2025)."""
    weight_decay: Amount = 0.1
    """Per unit of learning rate, of both. In DeepSpeed: 0 unless set."""
    betas: Betas = (0.9, 0.999)
    """AdamW's, of the rest. In DeepSpeed: 0.9 and 0.95 unless set."""
    eps: Amount = 1e-8
    """AdamW's, of the rest. In DeepSpeed: 1e-10 unless set."""

    ignored_keys = names_of("torch_adam fused foreach ns_method")
    fixed_keys: ClassVar[Mapping[str, tuple[bool | str, str]]] = {
        "per_head_muon": (False, "a matrix is made orthogonal as a whole")
    }


OptimizerConfig = AdamConfig | SGDConfig | MuonConfig

OPTIMIZERS: dict[str, type[Block]] = {"AdamW": AdamConfig, "Adam": AdamConfig, "SGD": SGDConfig, "Muon": MuonConfig}


class SchedulerBlock(Block):
    """A learning-rate schedule, `{"type": ..., "params": {...}}` in the source; steps are optimizer steps."""

    type: str
    required_keys: ClassVar[tuple[str, ...]] = ()
    ignored_keys = names_of("last_batch_iteration")


class WarmupBlock(SchedulerBlock):
    """A schedule that begins with a warmup."""

    warmup_num_steps: Count = 1000
    """Optimizer steps of the warmup; fewer than 2 count as 2. In DeepSpeed: 0 is an error."""
    warmup_type: WarmupType = "log"
    """Shape of the warmup: logarithmic or linear in the step."""


class WarmupLRConfig(WarmupBlock):
    """From `warmup_min_lr` up to `warmup_max_lr`, then constant."""

    type: Literal["WarmupLR"] = "WarmupLR"
    """Names this schedule."""
    warmup_min_lr: Rates = 0.0
    """Learning rate at the start."""
    warmup_max_lr: Rates | None = None
    """Learning rate after the warmup; the optimizer's `lr` where absent or "auto"."""


class WarmupDecayLRConfig(WarmupBlock):
    """As WarmupLR, then linearly down to `warmup_min_lr` at `total_num_steps`."""

    type: Literal["WarmupDecayLR"] = "WarmupDecayLR"
    """Names this schedule."""
    total_num_steps: Positive | None = None
    """Optimizer steps of the whole training; required."""
    warmup_min_lr: Rates = 0.0
    """Learning rate at the start and at the end."""
    warmup_max_lr: Rates = 1e-3
    """Learning rate after the warmup. "auto" falls back to the optimizer's `lr`."""

    required_keys = ("total_num_steps",)


class WarmupCosineLRConfig(WarmupBlock):
    """A share of the optimizer's `lr`: from `warmup_min_ratio` up to 1, then along half a cosine to `cos_min_ratio`."""

    type: Literal["WarmupCosineLR"] = "WarmupCosineLR"
    """Names this schedule."""
    total_num_steps: Positive | None = None
    """Optimizer steps of the whole training; required. In DeepSpeed: After it the cosine rises again; here the rate
    stays."""
    warmup_min_ratio: Amount = 0.0
    """Share of the optimizer's `lr` at the start of the warmup."""
    cos_min_ratio: Amount = 1e-4
    """Share of the optimizer's `lr` at the end."""

    required_keys = ("total_num_steps",)


class OneCycleConfig(SchedulerBlock):
    """Up to `cycle_max_lr` and back (Smith, 2018), with momentum going the other way, then an optional decay."""

    type: Literal["OneCycle"] = "OneCycle"
    """Names this schedule."""
    cycle_min_lr: Amount | None = None
    """Learning rate at both ends of the cycle; required."""
    cycle_max_lr: Amount | None = None
    """Learning rate at the top of the cycle; required."""
    cycle_first_step_size: Positive = 2000
    """Steps up."""
    cycle_second_step_size: Positive | None = None
    """Steps down; as many as up when absent."""
    decay_step_size: Count = 0
    """Steps per unit of decay after the cycle."""
    decay_lr_rate: Amount = 0.0
    """After n units of decay the learning rate is `cycle_min_lr` / (1 + this · n)."""
    cycle_momentum: Flag = True
    """Whether the first beta is cycled too, against the learning rate. As in DeepSpeed, the second beta is 0.99
    then."""
    cycle_min_mom: Beta = 0.8
    """First beta at the top of the cycle."""
    cycle_max_mom: Beta = 0.9
    """First beta at the end of the cycle."""
    decay_mom_rate: Amount = 0.0
    """After n units of decay the first beta is `cycle_max_mom` · (1 + this · n), and below 1."""

    required_keys = ("cycle_min_lr", "cycle_max_lr")
    ignored_keys = names_of("cycle_first_stair_count cycle_second_stair_count last_batch_iteration")


class LRRangeTestConfig(SchedulerBlock):
    """A learning rate that grows from step to step, to find a range of useful ones (Smith, 2017)."""

    type: Literal["LRRangeTest"] = "LRRangeTest"
    """Names this schedule."""
    lr_range_test_min_lr: Rates = 1e-3
    """Learning rate at the start."""
    lr_range_test_step_size: Positive = 2000
    """Optimizer steps in which the rate grows by `lr_range_test_step_rate`."""
    lr_range_test_step_rate: Amount = 1.0
    """Growth per `lr_range_test_step_size`, in units of the rate at the start."""
    lr_range_test_staircase: Flag = False
    """Whether it grows at the end of each `lr_range_test_step_size` alone."""


SchedulerConfig = WarmupLRConfig | WarmupDecayLRConfig | WarmupCosineLRConfig | OneCycleConfig | LRRangeTestConfig

SCHEDULERS: dict[str, type[SchedulerBlock]] = {
    "WarmupLR": WarmupLRConfig,
    "WarmupDecayLR": WarmupDecayLRConfig,
    "WarmupCosineLR": WarmupCosineLRConfig,
    "OneCycle": OneCycleConfig,
    "LRRangeTest": LRRangeTestConfig,
}
