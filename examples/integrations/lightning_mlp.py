"""A small network under Lightning, its parameters and optimizer state on NVMe: fit, validate, test, predict, resume.

    python examples/integrations/lightning_mlp.py --nvme-path /local_nvme --devices 2

`--plain` uses Lightning's own DDP strategy, all in memory: the losses are identical (in fp32).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme-path", type=Path, default=Path(".nvme"))
    parser.add_argument("--output", type=Path, default=Path("lightning-output"))
    parser.add_argument("--strategy", default="", help="a registered name instead of InfinityStrategy(...) on NVMe")
    parser.add_argument("--plain", action="store_true", help="Lightning's own strategy, in memory")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint of the first epoch")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0 for no limit")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--json", type=Path, help="write the losses there")
    return parser.parse_args()


if __name__ == "__main__":  # first, so that --help needs no Lightning
    options = parse_arguments()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from infinity.extras import needs  # noqa: E402

with needs("lightning"):
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

from infinity.integrations.lightning import InfinityStrategy  # noqa: E402


class Net(LightningModule):
    """Classifies points by the quadrant they lie in."""

    def __init__(self, hidden_size: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden_size),
            *(nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.GELU()) for _ in range(3)),
            nn.Linear(hidden_size, 4),
        )
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        classes: torch.Tensor = self(batch[0]).argmax(-1)
        return classes

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(seed: int) -> DataLoader[Any]:
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(points, (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0)), batch_size=16)


def main(options: argparse.Namespace) -> None:
    strategy: Any = options.strategy or "ddp"
    if not options.plain and not options.strategy:
        options.nvme_path.mkdir(parents=True, exist_ok=True)
        strategy = InfinityStrategy(
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
            offload_params_device="nvme",
            offload_optimizer_device="nvme",
            nvme_path=str(options.nvme_path),
        )
    seed_everything(0)
    model = Net()
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip or None,
        precision=options.precision,
        default_root_dir=options.output,
        callbacks=[ModelCheckpoint(dirpath=options.output, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(1), loader(2), ckpt_path=options.output / "epoch=0.ckpt" if options.resume else None)
    validated = trainer.validate(model, loader(2), verbose=False)
    tested = trainer.test(
        model, loader(3), verbose=False, ckpt_path=options.output / f"epoch={options.epochs - 1}.ckpt"
    )
    predicted = torch.cat(trainer.predict(model, loader(3)))
    if trainer.is_global_zero:
        print(f"first loss {model.losses[0]:.6f}, last {model.losses[-1]:.6f}; {validated[0]} {tested[0]}")
        if options.json:
            figures = {
                "losses": model.losses,
                "validated": validated,
                "tested": tested,
                "predicted": predicted.tolist(),
            }
            options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(options)
