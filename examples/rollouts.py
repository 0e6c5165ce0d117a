"""Reinforcement learning whose rollouts come from another process: train, send the weights, sleep, generate there, wake.

python examples/rollouts.py --nvme-path /local_nvme      a small GPT learns to write vowels

The other process stands for an inference engine such as vLLM or SGLang, whose loaders take (name, tensor) pairs. While it
generates, the trainer holds neither memory of the device nor pinned host memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig

import infinity
from infinity.units import format_bytes

SHAPE = GPTConfig(layers=4, hidden_size=256, context=16)
START, VOWELS = ord("\n"), torch.tensor([*b"aeiou"])


def serve(pipe: Connection, samples: int) -> None:
    """The inference engine: a model of its own, which takes weights, and generates when there are no more of them."""
    torch.manual_seed(1)
    model = GPT(SHAPE).eval()
    parameters = dict(model.named_parameters())
    while (name := pipe.recv()) is not None:
        if name in parameters:
            parameters[name].data.copy_(torch.from_numpy(pipe.recv()))
            continue
        tokens = torch.full((samples, 1), START)
        with torch.no_grad():
            while tokens.shape[1] < SHAPE.context:
                tokens = torch.cat([tokens, torch.multinomial(model(tokens)[:, -1].softmax(-1), 1)], dim=1)
        pipe.send(tokens)


def host_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nvme-path", type=Path, default=Path(".nvme"), help="a folder on the drive (default: .nvme)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=64, help="texts of a rollout (default: %(default)s)")
    parser.add_argument("--level", type=int, default=2, choices=(1, 2), help="how deep the trainer sleeps (default: 2)")
    asked = parser.parse_args()
    asked.nvme_path.mkdir(parents=True, exist_ok=True)
    place = {"device": "nvme", "nvme_path": str(asked.nvme_path)}
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, asked.samples), daemon=True)
    process.start()
    theirs.close()  # so that receiving fails if that process has ended
    torch.manual_seed(0)
    with infinity.init_empty():
        model = GPT(SHAPE)
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for _ in range(asked.steps):
            for name, weight in engine.named_weights(torch.float32):
                pipe.send(name)
                pipe.send(weight.cpu().numpy())
            awake, began = host_bytes(), time.perf_counter()
            engine.sleep(asked.level)
            slept, asleep = time.perf_counter() - began, host_bytes()
            pipe.send("")
            tokens = pipe.recv().to(engine.device)
            began = time.perf_counter()
            engine.wake()
            woke = time.perf_counter() - began
            reward = torch.isin(tokens[:, 1:], VOWELS.to(tokens.device)).float().mean(1)
            losses = F.cross_entropy(engine(tokens[:, :-1]).float().transpose(1, 2), tokens[:, 1:], reduction="none")
            engine.backward(((reward - reward.mean())[:, None] * losses).mean())
            engine.step()
            print(
                f"step {engine.global_steps}: {reward.mean():.1%} vowels; host memory {format_bytes(awake)}, asleep "
                f"{format_bytes(asleep)}; fell asleep in {slept:.3f} s, woke in {woke:.3f} s"
            )
    pipe.send(None)
    process.join()


if __name__ == "__main__":
    main()
