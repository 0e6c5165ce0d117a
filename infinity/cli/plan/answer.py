"""Answers what was asked for: whether a model trains in full on a machine, and on frozen weights in their files. Pure.

[Note: Easings]
Some arguments cost time and no accuracy: gradients that wait on NVMe, and saved activations in host memory. If a model does not
fit and the user left them open, they are tried before anything is refused, and the answer names those that were needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from infinity.cli.plan.remedies import Case, Easing, remedies
from infinity.plan.frozen import FrozenPlan, frozen_plans
from infinity.plan.planner import Plan, fastest_that_fits, plans_for


@dataclass(frozen=True)
class Answer:
    """Plans, and what follows from them.

    Attributes:
        plans: every strategy of full training, with `eased`.
        chosen: the fastest that fits, of those that infinity can run.
        eased: arguments that were added to make one fit; all that may be, where none does.
        remedies: where none fits: other arguments that would make one.
        frozen: work on files, with adapters of `lora_rank`.
        frozen_eased: arguments that were added to make the adapters' training fit.
    """

    plans: list[Plan]
    chosen: Plan | None
    eased: Easing
    remedies: list[str]
    frozen: list[FrozenPlan]
    frozen_eased: Easing
    lora_rank: int

    @property
    def something_fits(self) -> bool:
        return self.chosen is not None or any(plan.fits for plan in self.frozen)


def answer(case: Case, *, lora_rank: int, base_bits: int) -> Answer:
    """The answer for `case`, with as few of its easings as make something fit. [Note: Easings]"""

    def on_files(easing: Easing) -> list[FrozenPlan]:
        return frozen_plans(
            case.eased(easing), case.machine, lora_rank=lora_rank, base_bits=base_bits, **case.pinned_sizes
        )

    eased = next((easing for easing in case.easings if replace(case, easings=(easing,)).fits()), case.easings[-1])
    plans = plans_for(case.eased(eased), case.machine, **case.pinned_sizes)
    chosen = fastest_that_fits(plans)
    frozen_eased = next((easing for easing in case.easings if on_files(easing)[0].fits), ())
    needed = [] if chosen is not None else remedies(case)
    return Answer(plans, chosen, eased, needed, on_files(frozen_eased), frozen_eased, lora_rank)
