"""CIFAR-10 training from a script for DeepSpeed, with one changed line: the import.

A small convolutional net, its config from a JSON file, launched by torchrun. The images are synthetic and have
CIFAR-10's shape (3 × 32 × 32, ten classes: a pattern each, under noise), so that nothing has to be downloaded.

    torchrun --nproc-per-node 2 examples/cifar.py --deepspeed_config examples/cifar.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import infinity as deepspeed

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Images(Dataset[tuple[torch.Tensor, int]]):
    """`count` images; the patterns are the same for every `seed`, the noise is not."""

    def __init__(self, count: int, seed: int) -> None:
        coarse = torch.randn(len(CLASSES), 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, size=32, mode="bilinear")
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(CLASSES)
        noise = 3 * torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + index))
        return self.patterns[label] + noise, label


class Net(nn.Module):
    """The net of PyTorch's CIFAR-10 tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def add_argument() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional net on images like CIFAR-10's.")
    parser.add_argument("-e", "--epochs", type=int, default=2, help="passes over the images (default: 2)")
    parser.add_argument("--images", type=int, default=1600, help="images to train on (default: 1600)")
    parser.add_argument("--log-interval", type=int, default=10, help="steps between two log lines (default: 10)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    return parser.parse_args()


def main() -> None:
    args = add_argument()
    deepspeed.init_distributed()
    torch.manual_seed(0)

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Images(args.images, seed=1)
    )

    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(trainloader):
            inputs, labels = inputs.to(model_engine.device), labels.to(model_engine.device)
            if model_engine.fp16_enabled():
                inputs = inputs.half()
            loss = F.cross_entropy(model_engine(inputs).float(), labels)
            model_engine.backward(loss)
            model_engine.step()

            running_loss += loss.item()
            if (i + 1) % args.log_interval == 0 and dist.get_rank() == 0:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}", flush=True)
                running_loss = 0.0

    correct = test(model_engine)
    if dist.get_rank() == 0:
        print(f"Accuracy on held-out images: {100 * correct:.0f} %", flush=True)
    model_engine.destroy()
    dist.destroy_process_group()


@torch.no_grad()
def test(model_engine: deepspeed.Engine) -> float:
    """Return the share of held-out images that the net recognises; every rank evaluates all of them."""
    model_engine.eval()
    correct = total = 0
    for images, labels in DataLoader(Images(500, seed=2), batch_size=100):
        predicted = model_engine(images.to(model_engine.device)).argmax(1).cpu()
        correct += int((predicted == labels).sum())
        total += len(labels)
    return correct / total


if __name__ == "__main__":
    main()
