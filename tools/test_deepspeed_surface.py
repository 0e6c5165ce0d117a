#!/usr/bin/env python3
"""Run DeepSpeed's own tests against `import infinity as deepspeed`, and explain each failure.

    git clone --branch v0.19.8 https://github.com/deepspeedai/DeepSpeed
    tools/test_deepspeed_surface.py DeepSpeed              all of tests/unit that has to do with infinity's features
    tools/test_deepspeed_surface.py DeepSpeed runtime/zero/test_zero.py checkpoint

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    tools/test_deepspeed_surface.py --names DeepSpeedExamples

Each file is a pytest run of its own, with at most --parameters sets of parameters of a test and --seconds for a file. Prints a
table of counts (Markdown), and each failure that no rule below explains. Exits with 1 if there is one.

With --names nothing is run. Prints, for the Python files of a folder that import deepspeed, how many find all their names of
DeepSpeed in infinity, and for each missing name the number of files and the reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LEFT_OUT = {
    "features that infinity refuses": r"autotuning|compile/|compression|data_pipeline|elasticity|hybrid_engine|inference"
    r"|linear|model_parallelism|module_inject|moe/|onebit|rollout|sequence_parallelism|superoffload|tensor_parallel|ulysses"
    r"|zenflow|test_(curriculum|data_efficiency|pld|hifloat8|fp8|autotp|autoep|moe|tp_|zf|zeropp|compile|pipe|eigenvalue)",
    "DeepSpeed's own kernels": r"ops/(?!adam|lion)|test_zf_torch_adam|test_hybrid_adam",
    "its launcher, and other accelerators": r"launcher/|accelerator/|test_(ray|shm|tcp|socket|xla)",
    "its files, which infinity-ckpt imports": r"test_(universal|reshape|convert_checkpoint|affine|ckpt_file)"
    r"|test_data_parallel_writer",
}
"""Reason to leave files out → pattern of their paths."""

RULES = {
    "uses internals of DeepSpeed": r"InsideError|AttributeError|cannot import name|infinity_alias\.deepspeed",
    "needs a fixture that is a class, which pytest 9 does not collect": r"fixture '\w+' not found",
    "refused in words": r"infinity\.errors\.\w+Error|\b(Config|Infinity|Checkpoint|Budget|Store)Error: ",
    "expects another error, or other words": r"DID NOT RAISE|Regex pattern did not match",
    "asserts of which class an object is, or what DeepSpeed puts on it": r"assert (not )?isinstance\(|_external_params|\.ds_\w"
    r"|hasattr\(|tensor-LR contract|_bwd_fn",
    "expects zero.Init to make a process group": r"assert dist\.is_initialized\(\)",
    "needs a GPU": r"CUDA|cuda|nvidia-smi|none is available",
    "needs a package or the network": r"No module named '(?!deepspeed|infinity)|Connection|offline",
}
"""Reason of a failure → pattern of its text; the first match counts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkout", type=Path, help="DeepSpeed's repository; with --names, a folder of scripts")
    parser.add_argument(
        "only", nargs="*", help="files or folders below tests/unit (default: all that can have to do with it)"
    )
    parser.add_argument("--parameters", type=int, default=2, help="sets of parameters of a test (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="for a file (default: %(default)s)")
    parser.add_argument("--names", action="store_true", help="look up the names in a folder of scripts; run nothing")
    asked = parser.parse_args()
    if asked.names:
        return count_names(asked.checkout)
    unit = asked.checkout.resolve() / "tests" / "unit"
    if not (unit / "common.py").is_file():
        parser.error(f"{asked.checkout} is no checkout of DeepSpeed: there is no tests/unit/common.py")
    counts: Counter[str] = Counter()
    inside: Counter[tuple[str, str]] = Counter()
    for file in sorted(unit.rglob("test_*.py")):
        name = str(file.relative_to(unit))
        if asked.only and not any(name.startswith(only) for only in asked.only):
            continue
        why = next((why for why, pattern in LEFT_OUT.items() if re.search(pattern, name)), None)
        if why is not None and not asked.only:
            counts[f"left out, {why} (files)"] += 1
            continue
        for test, outcome, words in run(file, unit.parent, asked.parameters, asked.seconds):
            counts[outcome] += 1
            inside.update({*re.findall(r"has no attribute '(\w+)'|(deepspeed\.[\w.]+) is inside", words)})
            if words:
                where = sys.stdout if outcome == "unexplained" else sys.stderr
                print(f"{outcome}: {name}::{test}: {words}", file=where, flush=True)
        print(f"{name}: {dict(counts)}", file=sys.stderr, flush=True)
    print("| Tests | |\n|---|---|")
    for outcome, count in sorted(counts.items(), key=lambda item: (item[0] != "passed", item[0])):
        print(f"| {outcome} | {count} |")
    print("Inside:", ", ".join(f"{name or path} {count}" for (name, path), count in inside.most_common()))
    return 1 if counts["unexplained"] else 0


def run(file: Path, tests: Path, parameters: int, seconds: int) -> list[tuple[str, str, str]]:
    """(test, outcome, last words) of each test of a file."""
    environment = {
        **os.environ,
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "OMP_NUM_THREADS": "1",
        "DS_UNITTEST_TIMEOUT": "45",
    }
    environment["INFINITY_PARAMETERS_MAX"] = str(parameters)
    paths = [str(ROOT / "tools" / "deepspeed_own"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-p", "infinity_alias", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}", "-q"]
        command = [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}/tmp", str(file)]
        try:
            subprocess.run(command, cwd=tests, env=environment, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return [("", "unexplained", f"no end after {seconds} s")]
        if not report.exists():
            return [("", "unexplained", "no report")]
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [outcome_of(case) for case in cases]


def outcome_of(case: ElementTree.Element) -> tuple[str, str, str]:
    name = case.get("name", "")
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            words = f"{found.get('message', '')}\n{found.text or ''}"
            why = next((why for why, pattern in RULES.items() if re.search(pattern, words)), None)
            return name, f"failed: {why}" if why else "unexplained", found.get("message", "")[:300].replace("\n", " ")
    return name, "skipped" if case.find("skipped") is not None else "passed", ""


def count_names(folder: Path) -> int:
    """Print which names of DeepSpeed the scripts below a folder use and infinity lacks. Returns the exit status."""
    sys.path.insert(0, str(ROOT))
    files = {
        file: used for file in sorted(folder.rglob("*.py")) if (used := names_in(file.read_text(errors="replace")))
    }
    lacking = {file: {name: why for name in used if (why := why_missing(name))} for file, used in files.items()}
    print(f"{sum(not missing for missing in lacking.values())} of {len(files)} files find all their names")
    found_in: Counter[tuple[str, str]] = Counter()
    for file, missing in lacking.items():
        if missing:
            print(f"{file.relative_to(folder)}: {', '.join(sorted(missing))}", file=sys.stderr)
        found_in.update((name, why) for name, why in missing.items() if name.rpartition(".")[0] not in missing)
    print("| Name | Files | Reason |\n|---|---|---|")
    for (name, why), count in sorted(found_in.items(), key=lambda item: (-item[1], item[0])):
        print(f"| `{name}` | {count} | {why} |")
    return 0


def names_in(source: str) -> set[str]:
    """Return the names of DeepSpeed that a script imports or reaches through its imports: "deepspeed.zero.Init"."""
    nodes = [*ast.walk(ast.parse(source))]
    imported: dict[str, str] = {}
    used = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = {alias.name: alias.asname for alias in node.names if alias.name.split(".")[0] == "deepspeed"}
            used |= modules.keys()
            imported |= {name or "deepspeed": module if name else "deepspeed" for module, name in modules.items()}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "deepspeed":
            paths = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            used |= {*paths.values()}
            imported |= paths

    def path_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return imported.get(node.id)
        if isinstance(node, ast.Call) and (path := path_of(node.func) or "").endswith(".get_accelerator"):
            return f"{path}()"
        base = path_of(node.value) if isinstance(node, ast.Attribute) else None
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else None

    return used | {path for node in nodes if isinstance(node, ast.Attribute) and (path := path_of(node))}


def why_missing(name: str) -> str | None:
    """Return None if infinity has this name of DeepSpeed, else the reason that it gives."""
    found: object = importlib.import_module("infinity")
    path = "infinity"
    try:
        for part in name.split(".")[1:]:
            attribute = part.removesuffix("()")
            path = f"{path}.{attribute}"
            try:
                found = getattr(found, attribute)
            except AttributeError:
                found = importlib.import_module(path)
            if callable(found) and part.endswith("()"):
                found = found()
    except ModuleNotFoundError:
        return "internal to DeepSpeed"
    except ImportError as refusal:
        return str(refusal).partition(": ")[2]
    return None


if __name__ == "__main__":
    sys.exit(main())
