"""Every program of examples/ and bench/ shows its help where none of the optional packages is, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest

from infinity.extras import how_to_install

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    str(file.relative_to(ROOT))
    for folder in ("examples", "bench")
    for file in (ROOT / folder).rglob("*.py")
    if "argparse.ArgumentParser(" in (text := file.read_text()) and '__name__ == "__main__"' in text
)
WITHOUT = """
import runpy, sys
from pathlib import Path

for name in ("accelerate", "bitsandbytes", "deepspeed", "lightning", "matplotlib", "peft", "transformers", "wandb"):
    sys.modules[name] = None  # as where it is not installed
ours, *arguments = sys.argv[1:]
failed = []
for file in ours.split():
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.argv = [file, *arguments]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            failed.append(f"{file}: {ended.code}")
    except BaseException as error:
        failed.append(f"{file}: {type(error).__name__}: {error}")
    finally:
        del sys.path[0]
print("failed:", *failed, sep="\\n")
"""


def test_help_needs_no_optional_package() -> None:
    assert {"examples/finetune_lora.py", "examples/integrations/lightning_mlp.py", "bench/step.py"} <= {*PROGRAMS}
    done = launch.code(WITHOUT, " ".join(PROGRAMS), "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(PROGRAMS)
    assert done.stdout.endswith("failed:\n")


@pytest.mark.parametrize(
    ("program", "extras"), [("generate", ["transformers"]), ("finetune_lora", ["transformers", "peft"])]
)
def test_a_missing_package_is_a_line_with_the_command_that_installs_it(program: str, extras: list[str]) -> None:
    done = launch.code(WITHOUT, f"examples/{program}.py", "--params", "1M", cwd=ROOT)
    assert done.stderr.startswith(f"{program}: this needs {' and '.join(extras)} (")
    assert done.stderr.endswith(f"{how_to_install(*extras)}\n")
    assert "pip install 'transformers>=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("program", "option", "value"),
    [
        *((program, "--json", "/proc/nowhere/x") for program in ("generate", "finetune_lora", "does_not_fit")),
        ("finetune_lora", "--save", "/proc/nowhere"),
        ("finetune_lora", "--data", "/proc/nowhere"),
        ("generate", "--params", "0"),
        ("does_not_fit", "--nvme-path", __file__),
    ],
)
def test_what_can_not_be_read_or_written_is_told_before_the_work(program: str, option: str, value: str) -> None:
    done = launch.code(WITHOUT, f"examples/{program}.py", "--params", "200k", option, value, cwd=ROOT)
    said = done.stdout + done.stderr
    assert option in said and "Traceback" not in said
    assert "writing" not in said and "steps within" not in said
