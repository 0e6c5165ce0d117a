"""Lightning on our engine: the numbers of DDP, every registered name, checkpoints, evaluation, what is refused.

Parity is in fp32 and as for transformers' Trainer: on two ranks without clipping and accumulation.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning", reason="Lightning is not installed: tools/test_integration.sh lightning")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "integrations"))

import adapted
import lightning_mlp
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_mlp import Net, loader
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.errors import CheckpointError, ConfigError
from infinity.fsdp2.sharding import reshard
from infinity.integrations.lightning import InfinityStrategy

launch.import_also("lightning.pytorch")

NAMES = ["infinity", *(f"infinity_stage_{tail}" for tail in ("1", "2", "2_offload", "3", "3_offload"))]


@pytest.fixture
def run(nvme_path: Path, tmp_path: Path) -> Any:
    def train(*arguments: str, output: str = "output") -> dict[str, Any]:
        figures = tmp_path / "figures.json"
        places = ("--nvme-path", str(nvme_path), "--output", str(tmp_path / output), "--json", str(figures))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = launch.program(Path(lightning_mlp.__file__), *places, *arguments, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(figures.read_text())
        return found

    return train


def test_numbers_are_those_of_ddp_and_a_run_can_be_resumed(run: Any, nvme_path: Path) -> None:
    ours = run()
    assert ours == run("--plain", output="plain")
    assert len(ours["losses"]) == 64
    resumed = run("--resume")
    assert resumed["losses"] == ours["losses"][32:]
    assert resumed["predicted"] == ours["predicted"]
    assert not list(nvme_path.iterdir())


def test_two_ranks_give_the_numbers_of_ddp(run: Any) -> None:
    exact = ("--devices", "2", "--clip", "0", "--accumulate", "1")
    assert run(*exact) == run("--plain", *exact, output="plain")


def test_half_precision_trains(run: Any) -> None:
    found = run("--precision", "bf16-mixed")
    assert found["validated"][0]["val_loss"] < 0.5 < found["losses"][0]


def make_trainer(strategy: Any, output: Path, **settings: Any) -> Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        default_root_dir=output,
        **silent,
        **{"max_epochs": 1, **settings},
    )


def on_nvme(nvme_path: Path, **settings: Any) -> InfinityStrategy:
    return InfinityStrategy(stage=3, offload_optimizer=True, remote_device="nvme", offload_optimizer_device="nvme",
                            nvme_path=str(nvme_path), **settings)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_the_same(name: str, tmp_path: Path) -> None:
    found = []
    for strategy in ("ddp", name):
        seed_everything(0)
        model = Net()
        trainer = make_trainer(strategy, tmp_path, enable_checkpointing=False, limit_train_batches=8)
        trainer.fit(model, loader(1), loader(2))
        found.append(model.losses)
    assert found[0] == found[1]
    trainer.strategy.close()


def test_the_name_for_nvme_asks_for_nvme() -> None:
    zero = make_trainer("infinity_stage_3_offload_nvme", Path()).strategy.config["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]["device"], zero["offload_optimizer"]["device"]) == (3, "nvme", "nvme")
    assert zero["offload_param"]["nvme_path"] == "/local_nvme"


def test_arguments_reach_the_engine(nvme_path: Path, tmp_path: Path) -> None:
    strategy = on_nvme(nvme_path, block_size=1 << 18, queue_depth=4, sub_group_size=10_000, max_in_cpu=5)
    trainer = make_trainer(
        strategy,
        tmp_path,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        limit_train_batches=4,
        precision="bf16-mixed",
    )
    trainer.fit(Net(), loader(1), loader(2))
    engine = strategy.engine
    assert engine is not None
    settled = engine.config
    assert (settled.aio.block_size, settled.aio.queue_depth) == (1 << 18, 4)
    assert (settled.zero_optimization.sub_group_size, settled.zero_optimization.offload_param.max_in_cpu) == (10_000, 5)
    assert (settled.gradient_clipping, settled.batch.accumulation, settled.bf16.enabled) == (0.5, 4, True)
    assert engine.global_steps == trainer.global_step == 1
    strategy.close()


def test_a_config_in_a_file_is_taken(nvme_path: Path, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "gradient_clipping": 0.25,
                "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            }
        )
    )
    strategy = InfinityStrategy(config=tmp_path / "config.json")
    make_trainer(strategy, tmp_path, limit_train_batches=2).fit(Net(), loader(1), loader(2))
    assert strategy.engine is not None
    assert strategy.engine.config.gradient_clipping == 0.25
    strategy.close()


def test_muon_from_the_config_trains_as_in_memory(nvme_path: Path, tmp_path: Path) -> None:
    class WithoutOptimizer(Net):
        def configure_optimizers(self) -> Any:
            return None

    found = []
    for place in ({"device": "nvme", "nvme_path": str(nvme_path)}, {"device": "none"}):
        config = {
            "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        }
        seed_everything(0)
        model, strategy = WithoutOptimizer(), InfinityStrategy(config=config)
        make_trainer(strategy, tmp_path, limit_train_batches=6, enable_checkpointing=False).fit(model, loader(1))
        assert strategy.engine is not None
        assert {group["use_muon"] for group in strategy.engine.optimizer.param_groups} == {True, False}
        found.append(model.losses)
        strategy.close()
    assert found[0] == found[1] and len({*found[0]}) == 6


def test_schedules_drive_the_engines_optimizer(nvme_path: Path, tmp_path: Path) -> None:
    strategy = on_nvme(nvme_path)
    make_trainer(strategy, tmp_path, limit_train_batches=10).fit(Net(), loader(1), loader(2))
    assert strategy.engine is not None
    assert strategy.engine.get_lr() == [pytest.approx(3e-3 * (1 - 0.9 * 10 / 40))]
    strategy.close()


def test_a_module_keeps_its_engine_from_trainer_to_trainer(nvme_path: Path, tmp_path: Path) -> None:
    model, strategies = Net(), [on_nvme(nvme_path) for _ in range(3)]
    before = make_trainer(strategies[0], tmp_path).validate(model, loader(2), verbose=False)
    make_trainer(strategies[1], tmp_path, limit_train_batches=8).fit(model, loader(1), loader(2))
    after = make_trainer(strategies[2], tmp_path).validate(model, loader(2), verbose=False)
    assert after[0]["val_loss"] < before[0]["val_loss"]
    assert strategies[0].engine is strategies[1].engine is strategies[2].engine
    strategies[0].close()


def test_a_module_on_the_meta_device_is_filled(nvme_path: Path, tmp_path: Path) -> None:
    with infinity.init_empty():
        model = Net()
    strategy = on_nvme(nvme_path)
    make_trainer(strategy, tmp_path, limit_train_batches=8).fit(model, loader(1), loader(2))
    assert model.losses[-1] < model.losses[0] < 3
    strategy.close()


def test_old_checkpoints_are_removed_and_a_foreign_one_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    keep = ModelCheckpoint(dirpath=tmp_path / "kept", filename="{epoch}", save_top_k=1, monitor="val_loss", mode="min")
    strategy = on_nvme(nvme_path)
    trainer = make_trainer(strategy, tmp_path, max_epochs=3, limit_train_batches=8, callbacks=[keep])
    model = Net()
    trainer.fit(model, loader(1), loader(2))
    (kept,) = (tmp_path / "kept").iterdir()
    assert str(kept) == keep.best_model_path
    shutil.copytree(kept, tmp_path / "copy")
    (tmp_path / "copy" / "lightning.pt").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of InfinityStrategy"):
        trainer.test(model, loader(3), ckpt_path=tmp_path / "copy", verbose=False)
    strategy.close()


class Spiteful:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


class _WithState(Net):
    """Keeps in its checkpoint what it is given."""

    kept: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]


def test_no_code_of_a_checkpoint_is_run_unless_asked_for(
    nvme_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, strategy = _WithState(), on_nvme(nvme_path)
    trainer = make_trainer(strategy, tmp_path, limit_train_batches=4, enable_checkpointing=False)
    trainer.fit(model, loader(1))
    for name, kept in (("plain", {"seen": 3}), ("spiteful", Spiteful(tmp_path / "ran"))):
        model.kept = kept
        trainer.save_checkpoint(tmp_path / name)
        assert ("trust_checkpoints=True" in caplog.text) == (name == "spiteful")
    model.kept = None
    trainer.validate(model, loader(2), ckpt_path=tmp_path / "plain", verbose=False)
    assert model.kept == {"seen": 3}
    before = {name: p.full_tensor() + 0 for name, p in model.named_parameters()}
    with pytest.raises(
        CheckpointError, match=r"lightning\.pt .*mkdir.*if you trust its author, pass trust_checkpoints"
    ):
        trainer.validate(model, loader(2), ckpt_path=tmp_path / "spiteful", verbose=False)
    assert not (tmp_path / "ran").exists()
    assert all(torch.equal(p.full_tensor() + 0, before[name]) for name, p in model.named_parameters())
    (tmp_path / "plain" / "lightning.pt").write_bytes(b"\x93no/ise")
    with pytest.raises(CheckpointError, match=r"lightning\.pt is damaged"):
        trainer.validate(model, loader(2), ckpt_path=tmp_path / "plain", verbose=False)
    trusting = make_trainer(on_nvme(nvme_path, trust_checkpoints=True), tmp_path)
    trusting.validate(model, loader(2), ckpt_path=tmp_path / "spiteful", verbose=False)
    assert (tmp_path / "ran").exists()  # as asked
    strategy.close()


class _Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="automatic_optimization"):
        make_trainer(on_nvme(nvme_path), tmp_path).fit(_Manual(), loader(1), loader(2))


def test_clipping_by_value_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gradient_clip_algorithm"):
        make_trainer(on_nvme(nvme_path), tmp_path, gradient_clip_val=1, gradient_clip_algorithm="value").fit(
            Net(), loader(1), loader(2)
        )


def test_activations_are_kept_where_the_config_says(nvme_path: Path, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    config = {
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "infinity": {"offload_activations": {"device": "nvme", "bytes_min": 4096, "buffer_bytes": "4MiB"}},
    }
    strategies, losses = [on_nvme(nvme_path), InfinityStrategy(config=config)], []
    for strategy in strategies:
        seed_everything(0)
        model = Net()
        make_trainer(strategy, tmp_path, limit_train_batches=4, enable_checkpointing=False).fit(model, loader(1))
        losses.append(model.losses)
    engine = strategies[1].engine
    assert engine is not None
    assert engine.activations is not None
    assert engine.activations.moved > 0
    assert losses[0] == losses[1]
    for strategy in strategies:
        strategy.close()


class Logging(Net):
    """As `Net`, but its steps change nothing in the module."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_batch_that_is_split_trains_as_accumulation_does(precision: Any, nvme_path: Path, tmp_path: Path) -> None:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
    split = InfinityStrategy(config={"zero_optimization": zero, "infinity": {"micro_batches": 4}})
    found, losses = [], []
    for strategy, rows, accumulation in ((on_nvme(nvme_path), 8, 4), (split, 32, 1)):
        seed_everything(0)
        model, points = Logging(), loader(1).dataset
        settings = {"precision": precision, "accumulate_grad_batches": accumulation, "gradient_clip_val": 0.1}
        batches = 6 * accumulation
        trainer = make_trainer(strategy, tmp_path, limit_train_batches=batches, enable_checkpointing=False, **settings)
        trainer.fit(model, DataLoader(points, batch_size=rows))
        assert trainer.global_step == 6
        found.append(trainer.validate(model, loader(2), verbose=False))
        losses.append([sum(model.losses[step : step + accumulation]) for step in range(0, batches, accumulation)])
        strategy.close()
    assert found[0] == found[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # bf16 losses, added in bf16
    assert losses[1][-1] < losses[1][0]


EVERY_STEP = {"accumulate_grad_batches": 2, "gradient_clip_val": 1e-2, "enable_checkpointing": False}


class Adapted(LightningModule):
    """A model with adapters on frozen weights, made where Lightning wants it made. `weights`: in memory, of these."""

    def __init__(self, weights: Path | None = None, *, makes_anew: bool = False) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.weights, self.makes_anew = weights, makes_anew
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None and not self.makes_anew:
            return
        if self.weights is None:
            with infinity.init_empty():
                self.model = adapted.Model(adapted.WIDTH)
            return
        self.model = adapted.Model(adapted.WIDTH)
        tensors = load_file(self.weights / "model.safetensors")
        self.model.load_state_dict({**tensors, "head.weight": tensors["embedding.weight"]})

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        loss: torch.Tensor = self.model(batch)
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def adapters(module: LightningModule) -> dict[str, torch.Tensor]:
    """The values of what is trained, whole."""
    if hasattr(module, "reshard"):
        reshard(module)
    trained = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p) + 0 for name, p in trained.items()}


def sentences() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(list(torch.arange(16 * 9).view(16, 9) * 7 % adapted.VOCABULARY), batch_size=2)


def in_files(weights: Path) -> InfinityStrategy:
    """Frozen weights stay there, and nothing is written: no place is named."""
    return InfinityStrategy(
        stage=3, offload_parameters=True, offload_params_device="nvme", nvme_path="auto", weights=weights
    )


def check_is_in_files(strategy: InfinityStrategy, module: LightningModule) -> None:
    assert strategy.engine is not None
    swap = strategy.engine.swap
    assert swap is not None
    assert swap.paged.foreign_names == {name for name, p in module.named_parameters() if not p.requires_grad} != set()
    assert swap.stats().written_bytes == swap.stats().arena_bytes == 0
    assert swap.stats().read_bytes > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_adapters_train_on_frozen_weights_in_their_files(precision: Any, nvme_path: Path, tmp_path: Path) -> None:
    """The numbers of DDP in fp32, and of the engine in memory in bf16; nothing is written."""
    weights = adapted.save(nvme_path / "weights", adapted.Case())
    untouched = (weights / "model.safetensors").read_bytes()
    plain = precision == "32-true"
    memory: Any = "ddp" if plain else InfinityStrategy(stage=3, weights=weights)
    outcomes = []
    for strategy, module in ((memory, Adapted(weights if plain else None)), (in_files(weights), Adapted())):
        seed_everything(0)
        make_trainer(strategy, tmp_path, precision=precision, **EVERY_STEP).fit(module, sentences())
        outcomes.append((module.losses, adapters(module)))
        if isinstance(strategy, InfinityStrategy):
            if strategy is not memory:
                check_is_in_files(strategy, module)
            strategy.close()
    assert outcomes[0][0] == outcomes[1][0]
    assert len(set(outcomes[0][0])) == 8
    assert outcomes[0][1].keys() == outcomes[1][1].keys()
    assert [name for name, value in outcomes[0][1].items() if not torch.equal(value, outcomes[1][1][name])] == []
    assert (weights / "model.safetensors").read_bytes() == untouched
    assert [path.name for path in nvme_path.iterdir()] == ["weights"]


def test_adapters_come_back_from_a_checkpoint(nvme_path: Path, tmp_path: Path) -> None:
    """A resumed run has the numbers of one that was not stopped, and writes nothing in its own files."""
    weights = adapted.save(nvme_path / "weights", adapted.Case())
    seed_everything(0)
    whole, strategy = Adapted(), in_files(weights)
    make_trainer(strategy, tmp_path, max_epochs=2, **EVERY_STEP).fit(whole, sentences())
    expected = whole.losses, adapters(whole)
    strategy.close()
    seed_everything(0)
    first, strategy = Adapted(), in_files(weights)
    trainer = make_trainer(strategy, tmp_path, **EVERY_STEP)
    trainer.fit(first, sentences())
    trainer.save_checkpoint(tmp_path / "checkpoint")
    saved = adapters(first)
    validated = trainer.validate(first, sentences(), verbose=False)
    check_is_in_files(strategy, first)
    strategy.close()
    seed_everything(0)  # in which Lightning draws the order of the data
    again, strategy = Adapted(), in_files(weights)
    trainer = make_trainer(strategy, tmp_path, max_epochs=2, **EVERY_STEP)
    assert trainer.validate(again, sentences(), ckpt_path=tmp_path / "checkpoint", verbose=False) == validated
    loaded = adapters(again)
    assert [name for name in saved if not torch.equal(saved[name], loaded[name])] == []
    trainer.fit(again, sentences(), ckpt_path=tmp_path / "checkpoint")
    assert first.losses + again.losses == expected[0]
    trained = adapters(again)
    assert [name for name in trained if not torch.equal(trained[name], expected[1][name])] == []
    check_is_in_files(strategy, again)
    strategy.close()


def test_weights_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weights='.*nowhere': no such file or folder"):
        make_trainer(in_files(tmp_path / "nowhere"), tmp_path, **EVERY_STEP).fit(Adapted(), sentences())


def test_a_model_that_is_made_anew_is_refused(nvme_path: Path, tmp_path: Path) -> None:
    weights = adapted.save(nvme_path / "weights", adapted.Case())
    strategy, module = in_files(weights), Adapted(makes_anew=True)
    trainer = make_trainer(strategy, tmp_path, **EVERY_STEP)
    trainer.fit(module, sentences())
    with pytest.raises(ConfigError, match="let configure_model return where it has made them"):
        trainer.validate(module, sentences(), verbose=False)
    strategy.close()
