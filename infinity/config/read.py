"""Reads a config from a dict, a file, JSON text or base64, and sorts its keys."""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infinity.config.blocks import Block, ZeroConfig
from infinity.config.optimizers import OPTIMIZERS, SCHEDULERS
from infinity.config.rules import Flag, config_error, join, shown
from infinity.config.whole import NESTED, Config, known_paths, validated
from infinity.errors import ConfigError


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """The config in `source`: a dict, the path of a JSON file, JSON text, or base64 of the JSON (as some launchers pass
    it).

    JSON may have comments (`#`, `//`, `/* */`) and a comma after the last item, as in the Hjson that DeepSpeed reads.
    Values written as "auto" are listed in `Config.auto` and hold their defaults until `Config.resolve` fills them.

    Raises ConfigError when the source can't be read (path, line and column) or holds anything that can't be right;
    every problem is on a line of its own, with the dotted path of its key.
    """
    if isinstance(source, Mapping):
        return _read_config(source, "config")
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"a config is a dict, a path to JSON, JSON text, or base64 of JSON, got {type(source).__name__}"
        )
    text, origin = _read_text(source)
    return _read_config(_parse_json(text, origin), origin)


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were given more than once."""

    repeated: tuple[str, ...] = ()


def _read_text(source: str | os.PathLike[str]) -> tuple[str, str]:
    """The JSON text, and the words that name where it came from."""
    if isinstance(source, str) and _holds_object(text := source.removeprefix("\ufeff")):
        return text, "JSON config"
    path = Path(source)
    origin = str(path)
    try:
        return path.read_bytes().decode("utf-8-sig"), origin
    except UnicodeDecodeError as error:
        raise ConfigError(f"{origin}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # a long base64 string is not a valid file name
        if isinstance(source, str) and (decoded := _decode_base64(source)) is not None:
            return decoded, "base64 config"
        shown = origin if len(origin) <= 80 else f"{origin[:77]}..."
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{shown}: can't read the config: {reason}; expected a dict, the path of a JSON file, or base64 of JSON"
        ) from None


def _decode_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return decoded if _holds_object(decoded) else None


def _holds_object(text: str) -> bool:
    return _without_comments(text).lstrip().startswith("{")


_COMMENTS = re.compile(r'"(?:[^"\\]|\\.)*"|(?://|#)[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMAS = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])', re.DOTALL)


def _without_comments(text: str) -> str:
    """`text` with spaces in the place of comments and of commas after a last item, so that lines and columns stay."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _LAST_COMMAS.sub(blank, _COMMENTS.sub(blank, text))


def _parse_json(text: str, origin: str) -> Mapping[str, Any]:
    try:
        source = json.loads(_without_comments(text), object_pairs_hook=_make_object)
        repeated = list(_find_repeated(source))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{origin}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except ValueError as error:  # of a number with thousands of digits
        raise ConfigError(f"{origin}: not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: not a config: nested too deeply") from None
    if not isinstance(source, dict):
        raise ConfigError(f"{origin}: got {shown(source)}, expected a JSON object")
    if repeated:
        raise config_error(origin, [f"{path}: given more than once, keep one" for path in repeated])
    return source


def _make_object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        made.repeated = tuple(key for key in made if keys.count(key) > 1)
    return made


def _find_repeated(value: Any, where: str = "") -> Iterator[str]:
    if isinstance(value, _Object):
        yield from (join(where, key) for key in value.repeated)
        for key, inner in value.items():
            yield from _find_repeated(inner, join(where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _find_repeated(inner, f"{where}[{index}]")


def _read_config(source: Mapping[str, Any], origin: str) -> Config:
    reader = _Reader()
    values = reader.read_block(source, Config)
    config = validated(values, origin, auto=reader.auto, written=reader.written, problems=reader.problems)
    config._ignored, config._auto = tuple(reader.ignored), tuple(reader.auto)
    return config


class _Reader:
    """Walks a source and sorts its keys: values for the models, autos, ignored keys, and problems."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self.auto: list[str] = []
        self.problems: list[str] = []
        self.written: dict[str, str] = {}  # canonical path -> the path as the user wrote it

    def read_block(self, source: Mapping[Any, Any], model: type[Block], where: str = "") -> dict[str, Any]:
        if model is ZeroConfig:
            source = self._replace_deprecated(source, where)
        elif model is Config:
            source = self._replace_communication_type(source)
        values: dict[str, Any] = {}
        for written, value in source.items():
            if not isinstance(written, str):
                self.problems.append(f"{where or 'config'}: got the key {written!r}, expected a text")
                continue
            name = model.old_names.get(written, written)
            path = join(where, name)
            known = {*model.model_fields, *model.ignored_keys, *model.fixed_keys, *model.feature_keys}
            if name not in known or name == "type":  # the type is a neighbour of params
                self.problems.append(_explain_unknown(written, where))
            elif value is None:
                continue  # null is the same as leaving the key out
            elif name in model.ignored_keys:
                self.ignored.append(path)
            elif name in model.fixed_keys:
                wanted, reason = model.fixed_keys[name]
                if value != "auto" and not (
                    isinstance(value, (bool, str)) and str(value).lower() == str(wanted).lower()
                ):
                    self.problems.append(f"{path}: got {shown(value)}, expected {str(wanted).lower()}: {reason}")
            elif name in model.feature_keys:
                self._check_feature(value, path)
            elif path in self.written:
                self.problems.append(f"{join(where, written)}: given already as {self.written[path]}, keep one")
            else:
                self.written[path] = join(where, written)
                self._take(values, name, value, path)
        return values

    def _take(self, values: dict[str, Any], name: str, value: Any, path: str) -> None:
        nested = NESTED.get(path)
        if isinstance(value, str) and value == "auto":
            self.auto.append(f"{path}.enabled" if nested and "enabled" in nested.model_fields else path)
        elif (nested is not None or path in _TYPED) and not isinstance(value, Mapping):
            self.problems.append(f"{self.written[path]}: got {shown(value)}, expected an object")
        elif nested is not None:
            values[name] = self.read_block(value, nested, path)
        elif path in _TYPED:
            self._take_typed(values, path, value)
        else:
            values[name] = value

    def _take_typed(self, values: dict[str, Any], where: str, source: Mapping[Any, Any]) -> None:
        """The optimizer or the scheduler, `{"type": ..., "params": {...}}`."""
        for key in source:
            if key == "legacy_fusion" and where == "optimizer":
                self.ignored.append(f"{where}.{key}")
            elif key not in ("type", "params"):
                self.problems.append(_explain_unknown(str(key), where))
        params = source.get("params")
        if params is not None and not isinstance(params, Mapping) and params != "auto":
            self.problems.append(f"{where}.params: got {shown(params)}, expected an object")
        copied = dict(params) if isinstance(params, Mapping) else {}
        written, kinds = source.get("type"), _TYPED[where]
        by_name = {"auto": next(iter(kinds)), **{name.lower(): name for name in kinds}}
        kind = by_name.get(written.lower()) if isinstance(written, str) else None
        if kind is None:
            got = "missing" if written is None else f"got {shown(written)}"
            advice = _OTHER_OPTIMIZERS if where == "optimizer" and written is not None else ""
            self.problems.append(f"{where}.type: {got}, expected one of {', '.join(kinds)}{advice}")
            return
        is_adam = kind in ("AdamW", "Adam")
        decoupled = is_adam and self._pop_flag(copied, "adam_w_mode", f"{where}.params.adam_w_mode", default=True)
        block = self.read_block(copied, _TYPED[where][kind], f"{where}.params")
        if decoupled and str(copied.get("torch_adam")).lower() == "true":  # torch.optim.AdamW, whose default counts
            block.setdefault("weight_decay", 0.01)
        values[where] = {**block, "type": "AdamW" if decoupled else kind}

    def _replace_deprecated(self, source: Mapping[str, Any], where: str) -> dict[str, Any]:
        """`source` with the switches that came before the offload blocks turned into those blocks."""
        current = dict(source)
        pin_memory, used = current.pop("cpu_offload_use_pin_memory", None), False
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            path = join(where, old)
            if not self._pop_flag(current, old, path, default=False):
                continue
            used = True
            block = current.get(new)
            if isinstance(block, Mapping) and block.get("device", "cpu") != "cpu":
                self.problems.append(
                    f"{path}: got true together with {where}.{new}.device {shown(block['device'])}, keep the latter"
                )
            elif block is None or isinstance(block, Mapping):
                pinned = {} if pin_memory is None else {"pin_memory": pin_memory}
                current[new] = {**pinned, **(block or {}), "device": "cpu"}
        if "cpu_offload_use_pin_memory" in source and not used:
            self.ignored.append(join(where, "cpu_offload_use_pin_memory"))
        return current

    def _replace_communication_type(self, source: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """`source` with `communication_data_type` moved to `infinity.reduce_dtype`, unless that is set."""
        current = dict(source)
        value, block = current.pop("communication_data_type", None), current.get("infinity") or {}
        if isinstance(value, str) and value.lower() == "fp16":
            self.ignored.append("communication_data_type")
        elif value not in (None, "auto") and isinstance(block, Mapping) and block.get("reduce_dtype") is None:
            current["infinity"] = {**block, "reduce_dtype": value}
        return current

    def _pop_flag(self, source: dict[str, Any], key: str, path: str, *, default: bool) -> bool:
        value = source.pop(key, None)
        if value is None or value == "auto":
            return default
        try:
            return _FLAG.validate_python(value)
        except ValidationError:
            self.problems.append(f"{path}: got {shown(value)}, expected true or false")
            return default

    def _check_feature(self, value: Any, path: str) -> None:
        if not _is_on(value):
            self.ignored.append(path)
            return
        got = f": got {shown(value)}"
        if isinstance(value, Mapping):
            got = ".enabled: got true, expected false" if "enabled" in value else ": turned on"
        self.problems.append(f"{path}{got}: it changes what is computed, and infinity does not do it")


_TYPED: dict[str, Mapping[str, type[Block]]] = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
"""What each type is read as; the first one is "auto"."""

_FLAG = TypeAdapter[bool](Flag)

_OTHER_OPTIMIZERS = "; leave the block out and pass another to initialize, as optimizer=lambda groups: ..."


def _is_on(value: Any) -> bool:
    """Whether a key of `feature_keys` asks for something: true, a size above 1, or a block that does."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return _is_on(value["enabled"])
        return any(_is_on(inner) for inner in value.values() if isinstance(inner, Mapping))
    if isinstance(value, str):
        return value.lower() == "true"
    return value is True or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1)


_OTHER_NAMES = {"max_grad_norm": "gradient_clipping", "learning_rate": "lr", "max_lr": "warmup_max_lr"}
"""Names that other tools have for some keys."""


def _explain_unknown(written: str, where: str) -> str:
    path = join(where, written)
    paths = known_paths()
    if path in paths:
        return f"{path}: unknown key for this type, remove it"
    elsewhere = [other for other in paths if other.rpartition(".")[2] == _OTHER_NAMES.get(written, written)]
    if 1 <= len(elsewhere) <= 2:
        return f"{path}: unknown key here, it belongs at {' or '.join(elsewhere)}"
    here = {other.rpartition(".")[2]: other for other in paths if other.rpartition(".")[0] == where}
    anywhere = {other.rpartition(".")[2]: other for other in reversed(paths)}
    for names in (here, anywhere):
        if near := difflib.get_close_matches(written, names, n=1, cutoff=0.6):
            return f"{path}: unknown key, did you mean {names[near[0]]}?"
    return f"{path}: unknown key, remove it"
