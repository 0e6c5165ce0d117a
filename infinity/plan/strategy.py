"""Strategies: the placements of a model's states that are planned, and their consequences."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.schedule.scheme import COMPUTE_BYTES, MOMENT_BYTES, Scheme, Update


@dataclass(frozen=True)
class Strategy:
    """A placement of a model's states. stage: ZeRO stage; 2 keeps parameters gathered from forward to backward.
    parameters, optimizer: "none" (the device), "cpu" or "nvme", as in offload_param and offload_optimizer."""

    name: str
    stage: int
    parameters: str = "none"
    optimizer: str = "none"

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.parameters, self.optimizer)

    @property
    def on_host(self) -> bool:
        """True if updates are made in host memory."""
        return self.optimizer != "none"

    def moment_bytes(self, scheme: Scheme) -> float:
        """Return the bytes of a moment: the device's optimizer is torch's own, in fp32."""
        return scheme.moment_bytes if self.on_host else MOMENT_BYTES

    def stored_bytes(self, scheme: Scheme) -> tuple[int, float]:
        """Return the bytes on NVMe per element: of its compute parameter, and of its other state."""
        if self.optimizer != "nvme":
            return 0, 0
        return (COMPUTE_BYTES, scheme.other_state_bytes()) if self.parameters == "nvme" else (0, scheme.state_bytes)

    @property
    def keeps_compute(self) -> bool:
        """True if state is on NVMe and compute parameters are not. Gradients then stay with torch, in fp32, until the
        step takes them to host memory. Sub-groups are cut from all parameters, not from those of a group."""
        return self.optimizer == "nvme" and self.parameters != "nvme"

    def update_of(self, scheme: Scheme) -> Update:
        """Return the update timing. On the device it is the step. Gradients that the step takes to host memory are not
        applied earlier. State in host memory has no second slot for a speculative update."""
        if self.optimizer == "none":
            return "step"
        in_step = self.keeps_compute or (self.optimizer == "cpu" and scheme.speculative)
        return scheme.late if in_step and scheme.update == "backward" else scheme.update

    def all_gradients_wait(self, scheme: Scheme) -> bool:
        return self.update_of(scheme) != "backward" or scheme.speculative


STRATEGIES = (
    Strategy("stage 2", 2),
    Strategy("stage 2, optimizer on CPU", 2, optimizer="cpu"),
    Strategy("stage 3", 3),
    Strategy("stage 3, optimizer on CPU", 3, optimizer="cpu"),
    Strategy("stage 3, all on CPU", 3, parameters="cpu", optimizer="cpu"),
    Strategy("stage 3, optimizer on NVMe", 3, optimizer="nvme"),
    Strategy("stage 3, all on NVMe", 3, parameters="nvme", optimizer="nvme"),
)
"""From the fastest to the most frugal, as experts try them by hand."""
