"""The public names: each is there, and none is loaded before somebody uses it."""

from __future__ import annotations

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
    infinity.ops.sparse_attention
except AttributeError as error:
    assert "'infinity.ops' has no attribute 'sparse_attention'" in str(error), error
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "infinity.utils.zero_to_fp32", "--help"]
    assert "checkpoint_dir" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
