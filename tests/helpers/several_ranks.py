"""What several ranks do together, as scripts of several ranks: `several_ranks.py SCENE FOLDER`. Used by the tests."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity.checkpoint import dcp as checkpoint
from infinity.checkpoint.model_files import ModelFiles
from infinity.store import run_folder
from infinity.swap.shard import PagedShard


def model(layers: int = 3, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


def config(path: Path | str, **own: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(path)}
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "infinity": {"pinned_bytes_max": "16MiB", **own},
    }


def one_step(engine: infinity.Engine) -> float:
    loss = engine(torch.ones(2, 8)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def again_and_again(folder: Path) -> None:
    """Engines one after another in one process, each with a process group of its own."""
    for _ in range(3):
        engine, *_ = infinity.initialize(model=model(), config=config(folder))
        with engine:
            one_step(engine)
    print("made three engines", flush=True)


def failing_alone(folder: Path) -> None:
    """What fails on rank 1 alone, each in turn: all ranks go on, having heard of it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def told(kind: type[Exception], words: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except kind as error:
            text = str(error)
            assert words in text, text
            assert ("rank 1: " in text) == (rank == 0), text
        else:
            raise AssertionError(f"rank {rank} heard nothing of: {words}")

    def start(path: Path, **arguments: Any) -> Any:
        built = arguments.pop("built", None) or model()
        return infinity.initialize(model=built, config=arguments.pop("config", config(path)), **arguments)

    (folder / "file").touch()
    bad = folder / "file" / "below" if rank else folder
    told(infinity.StoreError, "is a file, not a folder", lambda: start(bad))
    told(infinity.ConfigError, "no such file", lambda: start(folder, weights="/nowhere" if rank else None))
    told(
        infinity.ConfigError,
        "spelled",
        lambda: start(folder, config={**config(folder), **({"spelled": 1} if rank else {})}),
    )

    wide = model(width=64 + rank)
    told(infinity.ConfigError, "float32 of shape (65, 8) here", lambda: start(folder, built=wide))
    with torch.device("meta" if rank else "cpu"):
        told(infinity.ConfigError, "on the meta device here", lambda: start(folder, built=model()))
    turned = nn.Sequential(OrderedDict([*model().named_children()][:: -1 if rank else 1]))
    told(infinity.ConfigError, "in another order here", lambda: start(folder, built=turned))
    own = folder / str(rank)
    own.mkdir()
    save_file(
        {name: value + (rank if name == "1.1.weight" else 0) for name, value in model().state_dict().items()},
        own / "file",
    )
    told(infinity.ConfigError, "differ from those of rank 0", lambda: start(folder, weights=own / "file"))

    sharded = model()
    fully_shard(sharded)
    with infinity.SwapManager(folder, pinned_bytes_max="16MiB" if rank == 0 else 2 << 40) as swap:
        told(infinity.BudgetError, "memory", lambda: swap.page(sharded))
    sharded(torch.ones(1, 8))

    engine, *_ = start(folder)
    with engine:
        one_step(engine)
        state = {"function": print} if rank else {}
        told(
            infinity.CheckpointError,
            "can't be stored",
            lambda: engine.save_checkpoint(folder / "c", client_state=state),
        )
        with mock.patch.object(checkpoint, "write_durably", _failing_for("rank1.pt")):
            told(infinity.CheckpointError, "rank1.pt", lambda: engine.save_checkpoint(folder / "d", tag="one"))
        assert not (folder / "d" / "one").exists()
        engine.save_checkpoint(folder / "e", tag="one")
        check = checkpoint._check

        def check_another(path: Path, *arguments: Any, **named: Any) -> Any:
            return check(path / "gone" if rank else path, *arguments, **named)

        with mock.patch.object(checkpoint, "_check", check_another):
            told(infinity.CheckpointError, "has no rank0.pt", lambda: engine.load_checkpoint(folder / "e"))
        engine.load_checkpoint(folder / "e")
        stage = PagedShard.read
        with mock.patch.object(PagedShard, "read", _failing(infinity.IoError) if rank else stage):
            told(infinity.IoError, "EIO", lambda: engine.save_16bit_model(folder / "m"))
        one_step(engine)
    dist.destroy_process_group()
    print("all were told", flush=True)


def overflowing_alone(folder: Path) -> None:
    """An fp16 gradient that only rank 1 finds too large: no rank steps, and all lower the scale."""
    logging.basicConfig()
    settings = {**config(folder), "bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, *_ = infinity.initialize(model=model(), config=settings)
    with engine:
        before = [p.data.to_local().clone() + 0 for p in engine.parameters()]
        size = 1e6 if dist.get_rank() else 1e-3
        engine.backward(engine(torch.full((2, 8), 1.0)).float().mean() * size)
        engine.step()
        assert engine.skipped_steps == 1
        assert all(torch.equal(a, b.data.to_local() + 0) for a, b in zip(before, engine.parameters(), strict=True))
        one_step(engine)
        assert engine.skipped_steps == 1
        assert not all(torch.equal(a, b.data.to_local() + 0) for a, b in zip(before, engine.parameters(), strict=True))
    print("skipped together", flush=True)


def of_first_rank(folder: Path) -> None:
    """Ranks seeded apart train what rank 0 has, also in copies of the model, and go on with their own random numbers."""
    rank = int(os.environ["RANK"])
    in_copies = config(folder)
    in_copies["zero_optimization"]["mics_shard_size"] = 1
    for settings in (
        config(folder),
        in_copies,
        {
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3},
        },
    ):
        for empty in (False, True):
            expected: dict[str, torch.Tensor] = {}
            for seed in (0, rank):  # what rank 0 makes, and what this rank does
                with infinity.init_empty() if empty and expected else contextlib.nullcontext():
                    made = model()
                torch.manual_seed(seed)
                if not (empty and expected):
                    made.apply(lambda module: hasattr(module, "reset_parameters") and module.reset_parameters())
                made.register_buffer("place", torch.full((3,), seed + 1.0), persistent=False)
                expected = expected or {name: value.clone() for name, value in made.state_dict().items()}
            random = torch.get_rng_state()
            engine, *_ = infinity.initialize(model=made, config=settings)
            with engine:
                assert torch.equal(torch.get_rng_state(), random) or rank == 0
                assert torch.equal(made.place, torch.ones(3)), made.place
                for name, parameter in made.named_parameters():
                    assert torch.equal(parameter.data.full_tensor() + 0, expected[name]), (name, empty, settings)


def set_by_one(folder: Path) -> None:
    """What rank 1 sets in a gathered parameter is what all ranks hold, on the drive and in the next forward."""
    of_first_rank(folder)
    for settings in (
        config(folder),
        {
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.01}},
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": 3},
        },
    ):
        trained = model()
        engine, *_ = infinity.initialize(model=trained, config=settings)
        with engine:
            before = trained[0].bias.data.full_tensor().clone()
            with infinity.zero.GatheredParameters(trained.parameters(), modifier_rank=1):
                assert trained[0].weight.shape == (64, 8)
                trained[0].weight.data.fill_(float(dist.get_rank()))
            full = trained[0].weight.data.full_tensor()
            assert torch.equal(full, torch.ones(64, 8)), full
            assert torch.equal(trained[0].bias.data.full_tensor(), before)
            one_step(engine)
    print("set by one", flush=True)


def writing_rank_fails(folder: Path) -> None:
    """Only rank 0 writes a 16-bit model; when it can't, the others don't wait for it."""
    engine, *_ = infinity.initialize(model=model(), config=config(folder))
    with engine, mock.patch.object(ModelFiles, "add", _failing(OSError)):
        try:
            engine.save_16bit_model(folder / "m")
        except infinity.CheckpointError as error:
            if "EIO" in str(error):
                print("told of the writer's failure", flush=True)


def long_prefetch_lists(folder: Path) -> None:
    """FSDP2 told to gather far ahead, in both directions: the smallest pool is enough, and the losses are the same."""
    losses = []
    for path in (None, folder):
        sharded = model(layers=9, width=1024)
        blocks = list(sharded[1].children())
        for block in blocks:
            fully_shard(block)
        fully_shard(sharded)
        for each, order in ((blocks, "forward"), (blocks[::-1], "backward")):
            for i, block in enumerate(each):
                getattr(block, f"set_modules_to_{order}_prefetch")(each[i + 1 : i + 8])
        with contextlib.ExitStack() as stack:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)
            if path is not None:
                # 5 groups and a little
                swap = stack.enter_context(infinity.SwapManager(path, pinned_bytes_max="15MiB"))
                swap.page(sharded, infinity.PagingOptions(param_persistence_threshold=0))
                optimizer = infinity.PagedAdamW(sharded.parameters(), swap=swap, lr=1e-3, fused=True)
            for _ in range(4):
                loss = sharded(torch.ones(2, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:4] == losses[4:], losses
    assert losses[0] != losses[3]
    dist.destroy_process_group()
    print("the pool was enough", flush=True)


def short_of_space_alone(folder: Path) -> None:
    """Rank 1 alone has no room for second slots: no rank takes them, unasked."""
    settings = {**config(folder), "gradient_clipping": 1.0}
    ranks_timings = []
    for short in (False, True):
        free = 3 << 20 if short and os.environ["RANK"] == "1" else 1 << 40
        with mock.patch.object(run_folder, "free_bytes", lambda path, free=free: free):
            engine, *_ = infinity.initialize(model=model(width=256), config=settings)
        with engine:
            one_step(engine)
            assert engine.swap is not None
            ranks_timings.append(engine.swap.paging.options.update)
    assert ranks_timings == ["backward", "forward"], ranks_timings
    print("of one mind", flush=True)


def _failing(kind: type[Exception]) -> Any:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise kind("EIO", 5) if kind is infinity.IoError else kind(5, "EIO")

    return fail


def _failing_for(name: str) -> Any:
    write = checkpoint.write_durably

    def write_or_fail(path: Path, content: bytes) -> None:
        if path.name == name:
            raise OSError(5, "EIO", str(path))
        write(path, content)

    return write_or_fail


def uneven(folder: Path) -> infinity.Engine:
    """Shards of which some end within a block of 8-bit moments, and have padding behind."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 77), nn.Linear(77, 31), nn.Linear(31, 3))
    return infinity.initialize(model=made, config=config(folder / "swap", moments_dtype="8bit"))[0]


def moments_of(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    kept = {}
    for name, parameter in engine.module.named_parameters():
        state = engine.optimizer.state[parameter]
        kept |= {f"{name} {moment}": state[moment].full_tensor() + 0 for moment in ("exp_avg", "exp_avg_sq")}
    return kept


def spoil(engine: infinity.Engine) -> None:
    """No moment is a number any more, padding included."""
    for state in engine.optimizer.state.values():
        for moment in ("exp_avg", "exp_avg_sq"):
            local = state[moment]._local_tensor
            local.store(torch.full(local.shape, torch.nan))
    assert all(value.isnan().all() for value in moments_of(engine).values())


def loaded_over_nan(folder: Path) -> None:
    """A load gives what was saved, whatever lay there."""
    with uneven(folder) as engine:
        for _ in range(2):
            one_step(engine)
        kept = moments_of(engine)
        for format in ("dcp", "arena"):
            engine.save_checkpoint(folder / format, format=format)
            engine.finish_checkpoint()
            spoil(engine)
            engine.load_checkpoint(folder / format)
            again = moments_of(engine)
            assert all(torch.equal(again[name], kept[name]) for name in kept), format
        if dist.get_rank() == 0:
            torch.save(kept, folder / "moments.pt")
    print("as it was", flush=True)


def loaded_over_nan_elsewhere(folder: Path) -> None:
    """The same on another number of ranks, where blocks arrive in pieces."""
    kept = torch.load(folder / "moments.pt")
    with uneven(folder) as engine:
        one_step(engine)
        for format in ("dcp", "arena"):
            spoil(engine)
            engine.load_checkpoint(folder / format)
            for name, moment in moments_of(engine).items():
                assert (moment - kept[name]).abs().max() <= 0.02 * kept[name].abs().max(), (format, name)
    print("nearly as it was", flush=True)


class Squares(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(x).float().square().mean()


def split_unevenly(folder: Path) -> None:
    """Batches of the ranks have different numbers of rows: each is split into as many parts as the shortest allows."""
    norms, rank = [], int(os.environ["RANK"])
    rows = torch.arange(48.0).view(6, 8) * (1 + rank)
    for count, own in ((6, {"micro_batches": 4}), (2, {})):
        lengths = (6, 2)[rank], (3, 1)[rank]
        accumulates = {"gradient_accumulation_steps": 2} if not own else {}
        engine, *_ = infinity.initialize(model=Squares(), config=config(folder, **own) | accumulates)
        with engine:
            x = rows[: lengths[0]]
            for part in [x] if own else x.split(lengths[1]):
                engine.backward(engine(part))
                engine.step()
            norms.append(engine.get_global_grad_norm())
            if own:
                loss = engine(x)
                engine.optimizer.zero_grad()
                with contextlib.suppress(infinity.InfinityError):
                    engine.backward(loss)
                    raise AssertionError("not refused, though gradients of parts are gone")
                engine.zero_grad()
                with contextlib.suppress(infinity.ConfigError):
                    engine(x, torch.zeros(5 if rank else count))
                    raise AssertionError("not refused on all ranks")
    assert norms[0] == norms[1] != 0, norms
    print("as many parts", flush=True)


def stepping_padding(folder: Path) -> None:
    """Rank 1 has nothing of the only parameter that is stepped, whose neighbours in its sub-group stay as they are."""
    dist.init_process_group("gloo")
    losses = []
    for paged in (False, True):
        layers = model()
        scales = [nn.Parameter(torch.ones(1, 64)) for _ in layers[1]]  # type: ignore[arg-type]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer, scale in zip(layers[1], scales, strict=True):  # type: ignore[arg-type]
            layer.scale = scale
            layer.register_forward_hook(lambda layer, _, out: out * layer.scale)
            fully_shard(layer, mp_policy=policy)
        fully_shard(layers, mp_policy=policy)
        stepped = [layer.scale for layer in layers[1]]  # type: ignore[union-attr]
        with infinity.SwapManager(folder, pinned_bytes_max="16MiB") if paged else contextlib.nullcontext() as swap:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(stepped, lr=1e-2, fused=True)
            if swap is not None:
                options = infinity.PagingOptions(master_weights="full", param_persistence_threshold=0)
                swap.page(layers, options)
                stepped = [layer.scale for layer in layers[1]]  # type: ignore[union-attr]
                optimizer = infinity.PagedAdamW(stepped, swap=swap, lr=1e-2)
            for _ in range(3):
                loss = layers(torch.ones(2, 8)).float().square().mean()
                loss.backward()
                optimizer.step()
                layers.zero_grad()
                losses.append(loss.item())
    assert losses[:3] == losses[3:] and losses[0] != losses[2], losses
    print("only what is here", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
