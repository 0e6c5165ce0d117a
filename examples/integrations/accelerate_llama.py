"""A loop written for accelerate, with the model's state on NVMe: accumulate, clip, evaluate, save the state, load it.

    python examples/integrations/accelerate_llama.py --config ds.json

`--plain` uses accelerate's own Accelerator, all in memory: the losses are identical (in fp32). Without `--config`, the file is
that of `accelerate launch --use_deepspeed --deepspeed_config_file`, or the one in ACCELERATE_DEEPSPEED_CONFIG_FILE.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from trainer_llama import Sentences, make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a DeepSpeed config")
    parser.add_argument("--output", type=Path, default=Path("accelerate-output"))
    parser.add_argument("--plain", action="store_true", help="accelerate's own Accelerator")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--resume", action="store_true", help="resume from the state that an earlier run saved")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()

    settings: dict[str, Any] = {"cpu": not torch.cuda.is_available(), "gradient_accumulation_steps": options.accumulate}
    if options.plain:
        from accelerate import Accelerator
    else:
        from infinity.integrations.accelerate import InfinityAccelerator as Accelerator

        settings["config"] = options.config
    accelerator = Accelerator(**settings)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader, held_out = DataLoader(Sentences(64, 1), batch_size=4), DataLoader(Sentences(22, 2), batch_size=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    steps: list[Any] = []
    evaluated: list[Any] = []
    first_epoch = 1 if options.resume else 0
    if options.resume:
        accelerator.load_state(str(options.output / "state"))
    for epoch in range(first_epoch, 2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm)
                    mean_loss = float(accelerator.gather(loss.detach()).mean())
                    steps.append((mean_loss, scheduler.get_last_lr(), float(norm)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        tokens = []
        for batch in held_out:
            with torch.no_grad():
                logits = model(**batch).logits
            tokens.append(accelerator.gather_for_metrics(logits.argmax(-1)))
        evaluated.append(torch.cat(tokens).tolist())
        if epoch == 0:
            accelerator.save_state(str(options.output / "state"))
    accelerator.unwrap_model(model).save_pretrained(
        options.output / "final",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        print(f"last loss: {steps[-1][0]:.4f}")
        if options.json:
            options.json.write_text(json.dumps({"steps": steps, "evaluated": evaluated}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
