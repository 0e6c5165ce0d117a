"""`python -m infinity.config`: print the reference of the config, docs/config.md, written from the models."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from infinity.config.blocks import Block
from infinity.config.optimizers import SCHEDULERS, AdamConfig, MuonConfig, SGDConfig
from infinity.config.rules import Rule
from infinity.config.whole import NESTED, Config

_INTRO = """\
# The training config

<!-- Written by `python -m infinity.config > docs/config.md`; change the models in infinity/config/ instead of this file. -->

infinity reads the JSON that DeepSpeed users own: `infinity.config.load_config` takes a dict, the path of a JSON file,
JSON text, or base64 of JSON. It may have comments (`#`, `//`, `/* */`). Every key is optional unless it says otherwise.

- Booleans may be the strings "true" and "false", integers may be written as `1e9` or `"40M"`, and byte counts as
  `"512MiB"`. `null` is the same as leaving the key out.
- `"auto"` may stand for any value. `Config.resolve(world_size=..., hidden_size=..., lr=..., ...)` fills it from the
  caller's arguments by name; a value that isn't filled takes the default below, unless its row says what auto does.
- `train_batch_size` = `train_micro_batch_size_per_gpu` · `gradient_accumulation_steps` · number of ranks. Two give the
  third; what can't be derived is 1.
- A key that exists in DeepSpeed and means nothing here is accepted and listed in `Config.ignored`. A key that exists
  nowhere is an error, with the nearest name suggested.
- The last column says what is otherwise in DeepSpeed; where it is empty, a key means the same there.
"""


def render_reference() -> str:
    parts = [_INTRO, *_render_block("Top level", "", Config)]
    for path, model in NESTED.items():
        parts += _render_block(f"`{path}`", path, model)
    parts += _render_block("`optimizer` of type AdamW or Adam", "optimizer", AdamConfig)
    parts += _render_block("`optimizer` of type SGD", "optimizer", SGDConfig)
    parts += _render_block("`optimizer` of type Muon", "optimizer", MuonConfig)
    for name, scheduler in SCHEDULERS.items():
        parts += _render_block(f"`scheduler` of type {name}", "scheduler", scheduler)
    return "\n".join(parts)


def _render_block(title: str, path: str, model: type[Block]) -> list[str]:
    lines = [f"## {title}", "", " ".join((model.__doc__ or "").split()), ""]
    lines += ["| Key | Value | Default | Meaning | In DeepSpeed |", "|---|---|---|---|---|"]
    meanings = meanings_of(model)
    lines += [_render_field(name, path, model, *meanings[name]) for name in model.model_fields]
    lines.append("")
    if model.old_names:
        lines += ["Old names: " + ", ".join(f"`{old}` for `{new}`" for old, new in model.old_names.items()) + ".", ""]
    if model.fixed_keys:
        fixed = (f"`{key}` {str(value).lower()} ({why})" for key, (value, why) in model.fixed_keys.items())
        lines += ["Accepted with one value only: " + ", ".join(fixed) + ".", ""]
    if model.feature_keys:
        features = ", ".join(f"`{key}`" for key in sorted(model.feature_keys))
        lines += [f"Ignored unless they are on (an `enabled`, a size above 1), which is an error: {features}.", ""]
    if model.ignored_keys:
        lines += ["Accepted and ignored: " + ", ".join(f"`{key}`" for key in sorted(model.ignored_keys)) + ".", ""]
    return lines


def meanings_of(model: type[Block]) -> dict[str, tuple[str, str]]:
    """What each key means, here and in DeepSpeed, by the texts below the fields of the model and of its bases."""
    meanings: dict[str, tuple[str, str]] = {}
    for base in [base for base in reversed(model.__mro__) if issubclass(base, Block) and base is not Block]:
        (block,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(block, ast.ClassDef)
        for field, text in pairwise(block.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                meaning, _, in_deepspeed = " ".join(str(text.value.value).split()).partition(" In DeepSpeed: ")
                meanings[ast.unparse(field.target)] = meaning, in_deepspeed
    return meanings


def _render_field(name: str, path: str, model: type[Block], meaning: str, in_deepspeed: str) -> str:
    field = model.model_fields[name]
    key = f"params.{name}" if path in ("optimizer", "scheduler") and name != "type" else name
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Block) or name in ("optimizer", "scheduler"):
        wanted, shown = "an object", ""
    elif path in ("optimizer", "scheduler") and name == "type":
        wanted, shown = " or ".join(f'"{kind}"' for kind in get_args(field.annotation)), ""
    else:
        wanted = _find_wanted(field.annotation, field.metadata)
        shown = "" if default is None else f"`{json.dumps(default)}`"
    return f"| `{key}` | {wanted} | {shown} | {meaning} | {in_deepspeed} |"


def _find_wanted(annotation: Any, metadata: Sequence[Any]) -> str:
    """The name of the values of a field, whose rule is inside the annotation if the field may be absent."""
    for rule in metadata:
        if isinstance(rule, Rule):
            return rule.wanted_of(annotation)
    present, _none = get_args(annotation)
    return _find_wanted(present.__origin__, present.__metadata__)


if __name__ == "__main__":
    sys.stdout.write(render_reference())
