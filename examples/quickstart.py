from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import infinity

CONTEXT, WIDTH, STEPS = 32, 512, 40
text = torch.frombuffer(bytearray(Path(F.__file__).read_bytes()), dtype=torch.uint8).long()
starts = torch.randperm(len(text) - CONTEXT, generator=torch.Generator().manual_seed(0)).tolist()
dataset = [(text[start : start + CONTEXT], text[start + CONTEXT]) for start in starts]  # 32 bytes, and the next one

with infinity.init_empty():  # no memory for the parameters, however many
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    first = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, WIDTH)]
    model = nn.Sequential(*first, *blocks, nn.Linear(WIDTH, 256))
engine, _, dataloader, _ = infinity.initialize(model=model, config="config.json", training_data=dataset)
for _, (context, following) in zip(range(STEPS), dataloader, strict=False):
    logits = engine(context).float()
    loss = F.cross_entropy(logits, following.to(logits.device))
    engine.backward(loss)
    engine.step()
    took = engine.step_stats
    rates = f"{context.numel() / took.seconds:.0f} tokens/s, read {took.read_bytes / took.seconds / 1e9:.2f} GB/s"
    print(f"step {engine.global_steps}: loss {loss:.3f}, {rates}, waited {took.stall_seconds:.2f} s for the drive")
engine.save_checkpoint("checkpoints")
engine.close()
