"""The public names: each exists, and none is loaded before its first use."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import infinity


def test_every_public_name_can_be_loaded_and_is_listed() -> None:
    for name in infinity.__all__:
        assert getattr(infinity, name) is not None
        assert name in dir(infinity)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'infinity' has no attribute 'Engin'"):
        _ = infinity.Engin  # type: ignore[attr-defined]


def test_importing_infinity_does_not_load_torch() -> None:
    code = "import sys, infinity; assert 'torch' not in sys.modules; infinity.Engine; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_framework_is_loaded_before_its_integration_which_names_what_is_missing() -> None:
    code = """
import importlib, sys, infinity
for name in infinity.__all__:
    getattr(infinity, name)
frameworks = ("deepspeed", "transformers", "lightning", "accelerate", "trl")
assert not {*frameworks} & sys.modules.keys()
for name in frameworks:
    sys.modules[name] = None  # as where it is not installed
    try:
        importlib.import_module(f"infinity.integrations.{name}")
    except ImportError as error:
        assert f"this needs {name} (" in str(error) and "pip install '" + name in str(error), error
        assert isinstance(error, infinity.InfinityError)
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_deepspeed_s_import_paths_lead_to_one_module_and_load_nothing_before_use() -> None:
    code = """
import importlib, sys, infinity
from infinity.deepspeed import MODULE_OF, PACKAGES
assert not {*MODULE_OF, *MODULE_OF.values(), *PACKAGES} & sys.modules.keys()
assert infinity.ops.adam.FusedAdam  # no import statement needed
for path, module in MODULE_OF.items():
    assert importlib.import_module(path) is importlib.import_module(module), path
    assert sys.modules[module].__spec__.name == module
try:
    infinity.ops.lion
except AttributeError as error:
    assert "'infinity.ops' has no attribute 'lion'" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "infinity.utils.zero_to_fp32", "--help"]
    assert "checkpoint_dir" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "from infinity import DeepSpeedTransformerLayer",
            "DeepSpeedTransformerLayer is not available: build the model",
        ),
        ("infinity.OnDevice", "use infinity.init_empty()"),
        ("import infinity.compression.compress", "compression is not available: compress the trained model"),
        ("from infinity.moe.layer import MoE", "moe.layer is not available: a model's own experts"),
        ("infinity.ops.sparse_attention", "ops.sparse_attention is not available: use torch.nn.attention"),
        ("from infinity.ops.op_builder import GDSBuilder", "AsyncIOBuilder reads and writes through host memory"),
        ("from infinity.runtime.fp16.fused_optimizer import FP16_Optimizer", "initialize() returns the optimizer"),
        (
            "from infinity.runtime.zero.partition_parameters import ZeroParamStatus",
            "use infinity.zero; parameters have",
        ),
    ],
)
def test_names_of_deepspeed_that_are_refused_say_what_to_do(statement: str, words: str) -> None:
    with pytest.raises(ImportError, match=re.escape(words)):
        exec(statement, {"infinity": infinity})


def test_a_missing_name_without_a_refusal_is_an_ordinary_error() -> None:
    for statement in ("import infinity.compressing", "from infinity.ops.op_builder import CPUAdamBuilder"):
        with pytest.raises(ImportError, match=r"No module named|cannot import name"):
            exec(statement)
