"""Fine-tune a model with LoRA; its frozen weights stay in the downloaded files.

python examples/finetune_lora.py --model DIR                a model of Hugging Face: config.json and safetensors
python examples/finetune_lora.py --params 1B                a temporary one with random weights
python examples/finetune_lora.py --model DIR --in-memory    the same training, all in memory: the same losses
torchrun --nproc-per-node 2 examples/finetune_lora.py --model DIR      sharded over two ranks

Needs transformers and peft, and says how to install what is missing.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import sysconfig  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from made_model import VOCABULARY, add_model_arguments, check_model, made_model  # noqa: E402

import infinity  # noqa: E402
from infinity.extras import needs  # noqa: E402
from infinity.units import format_bytes, format_count  # noqa: E402

TEXT_BYTES_MAX = 4 << 20


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Ctrl-C ends the run. The model's files are never written to.",
    )
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--data", type=Path, help="a text file (default: the source of Python's standard library)")
    parser.add_argument("--pinned-bytes-max", default="auto", help='pinned host memory, such as "1GiB" (default: auto)')
    parser.add_argument("--in-memory", action="store_true", help="hold everything in memory instead")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="save the adapters there, for PeftModel.from_pretrained"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, bytes and seconds there")
    asked = parser.parse_args(argv)
    for name in ("steps", "batch_size", "context", "rank"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(asked, name)}")
    check_model(parser, asked)
    try:
        if asked.data is not None:
            asked.data.open().close()
        if asked.save is not None:
            asked.save.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=asked.save).close()
    except OSError as error:
        parser.error(f"--data or --save: {error.filename}: {error.strerror}")
    return asked


@contextlib.contextmanager
def model_folder(asked: argparse.Namespace) -> Iterator[tuple[Path, float]]:
    """Yield the folder of the model's files, created and later removed if need be, and the seconds to create them. A
    collective."""
    if asked.model is not None:
        yield asked.model, 0.0
        return
    with contextlib.ExitStack() as stack:
        made: list[Any] = [None]
        if dist.get_rank() == 0:
            made = [stack.enter_context(made_model(asked, tell))]
        dist.broadcast_object_list(made)
        yield made[0]
        dist.barrier()


def load_tokens(asked: argparse.Namespace, folder: Path) -> torch.Tensor:
    """Return the training text as tokens of the model's tokenizer, or as bytes for a model created here."""
    if asked.data is not None:
        text = asked.data.read_bytes()[:TEXT_BYTES_MAX]
    else:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)[:TEXT_BYTES_MAX]
    if asked.model is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % VOCABULARY
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"])


def make_engine(asked: argparse.Namespace, folder: Path) -> infinity.Engine:
    """Return an engine of the model with adapters, built without memory; its weights stay in `folder`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with infinity.init_empty():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=asked.rank, lora_alpha=2 * asked.rank))
    if asked.checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    place = {"device": "none"} if asked.in_memory else {"device": "nvme", "nvme_path": "auto"}
    engine, *_ = infinity.initialize(
        model=model,
        weights=folder,
        config={
            "train_micro_batch_size_per_gpu": asked.batch_size,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": asked.lr}},
            "zero_optimization": {"stage": 3, "offload_param": place},
            "infinity": {"pinned_bytes_max": asked.pinned_bytes_max} if not asked.in_memory else {},
        },
    )
    return engine


def moved_bytes() -> tuple[int, int]:
    """Return (read, written) bytes of this process by the kernel's counters; (0, 0) if it has none."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    except OSError:
        return 0, 0


def train(
    asked: argparse.Namespace, engine: infinity.Engine, tokens: torch.Tensor, make_seconds: float
) -> dict[str, Any]:
    """Train, and return the figures."""
    frozen = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    tell(f"{format_count(trained)} of {format_count(frozen + trained)} parameters are trained")
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    first_step_seconds = time.time() - STARTED - make_seconds
    moved = [moved_bytes()]
    losses, seconds = [], []
    for number in range(asked.steps):
        began = time.perf_counter()
        starts = torch.randint(len(tokens) - asked.context, (asked.batch_size,), generator=draw)
        batch = torch.stack([tokens[start : start + asked.context] for start in starts])
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        moved.append(moved_bytes())
        tell(f"step {number + 1:>4}/{asked.steps}  loss {losses[-1]:.4f}  {seconds[-1]:.2f} s")
    first = min(1, asked.steps - 1)  # the first step also loads code; skip it if there is another
    read, written = (moved[-1][i] - moved[first][i] for i in (0, 1))
    figures = {
        "frozen_parameters": frozen,
        "trained_parameters": trained,
        "losses": losses,
        "step_seconds": seconds,
        "first_step_seconds": first_step_seconds,
        "step_read_bytes": [after[0] - before[0] for before, after in itertools.pairwise(moved)],
        "read_bytes_per_frozen_param": read * dist.get_world_size() / frozen / (asked.steps - first),
        "written_bytes": written,
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    if engine.swap is not None:
        stats = engine.swap.stats()
        figures |= {"pinned_bytes": stats.pinned_bytes, "arena_bytes": stats.arena_bytes}
    return figures


def tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    asked = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("transformers").setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with needs("transformers", "peft"):
            import peft  # noqa: F401
            import transformers  # noqa: F401
        with model_folder(asked) as (folder, make_seconds):
            tokens = load_tokens(asked, folder)
            if len(tokens) <= asked.context:
                raise infinity.ConfigError(f"the text has {len(tokens)} tokens: give more, or a shorter --context")
            with make_engine(asked, folder) as engine:
                figures = train(asked, engine, tokens, make_seconds)
                if asked.save is not None:
                    engine.module.save_pretrained(asked.save)
                    tell(f"adapters saved to {asked.save}")
        tell(
            f"read {figures['read_bytes_per_frozen_param']:.2f} bytes per frozen parameter and step, wrote "
            f"{format_bytes(figures['written_bytes'])}; peak resident memory {format_bytes(figures['peak_rss_bytes'])}; "
            f"{figures['first_step_seconds']:.1f} s from start to the first step"
        )
        if asked.json is not None and dist.get_rank() == 0:
            asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    except infinity.InfinityError as error:
        print(f"finetune_lora: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nfinetune_lora: ended by Ctrl-C; the model's files are as they were", file=sys.stderr)
        return 130
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
