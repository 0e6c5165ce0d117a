"""The tree tests itself: imports go downward only and never in a circle, no module is dead, the commands exist, and what is
in the repository is text that names no machine.

The floors are those of the house in docs/architecture.md. Source is read, never imported, so this needs no extension.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The part of the house that a module belongs to is the name after `infinity.`: a folder, or a file on the ground floor; or a
# folder within a folder that is named here.
FLOORS: dict[str, int] = {
    "infinity_offload": 18,  # a module outside the package, the entry point of the commands
    "cli": 17,
    "__main__": 17,
    "integrations": 16,
    "": 15,  # infinity/__init__.py, the public names: above all it names, beneath those who use the library
    "deepspeed": 14,
    "runtime": 11,
    "checkpoint": 10,
    "activations": 9,
    "swap": 8,
    "fsdp2": 7,
    "plan": 7,
    "optim": 6,
    "schedule": 6,
    "drive": 5,
    "store": 4,
    "device": 4,
    "aio": 3,
    "ranks": 2,
    "config": 1,
    "host_memory": 1,
    "_aio": 1,  # the compiled half of aio
    "_optim": 1,  # the compiled half of optim
    "_decode": 1,  # the compiled half of store's formats
    "errors": 0,
    "extras": 0,
    "kernel_files": 0,
    "torch_versions": 0,
    "units": 0,
}

GROUND = 0
"""On which files may know each other."""

COMPILED = {"infinity._aio", "infinity._optim", "infinity._decode"}

# `schedule` is policy: integers in, decisions out. Not even through other modules may it come to these ...
NEVER_IN_SCHEDULE = {"torch", "infinity.aio", "infinity._aio"}
# ... and in its own files it does no I/O.
IO_MODULES = {"asyncio", "fcntl", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess", "sys", "tempfile"}
IO_CALLS = {"open", "print", "input"}


class Import(NamedTuple):
    target: str  # dotted, absolute: the module, or the name in it
    line: int


class Tree:
    """The modules under root/infinity, and infinity_offload, by their dotted names, and what each imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        for path in sorted([*(root / "infinity").rglob("*.py"), *root.glob("infinity_offload.py")]):
            parts = path.relative_to(root).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.syntax = {name: ast.parse(path.read_text(), str(path)) for name, path in self.files.items()}
        self.imports = {name: list(self._imports(name)) for name in self.files}

    def _imports(self, name: str) -> Iterator[Import]:
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        yield from imports_of(self.syntax[name], package)
        # Lazily loaded names are often a table of modules, written as text; parts of f-strings are none.
        nodes = list(ast.walk(self.syntax[name]))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                target = package + node.value if node.value.startswith(".") else node.value
                if target in self.files and target != "infinity":
                    yield Import(target, node.lineno)

    def module_of(self, target: str) -> str | None:
        """The module of ours that importing `target` names: itself, or the one that holds it."""
        while target:
            if target in self.files or target in COMPILED:
                return target
            target = target.rpartition(".")[0]
        return None

    def where(self, name: str, line: int) -> str:
        return f"{self.files[name].relative_to(self.root)}:{line}"

    def reachable(self, starts: set[str]) -> set[str]:
        """The modules that run, sooner or later, once `starts` are imported: those they import and the packages around
        them. infinity/__init__.py, which runs whatever is imported, does not count as such a package."""
        seen: set[str] = set()
        waiting = list(starts & set(self.files))
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            targets = {self.module_of(found.target) for found in self.imports[name]}
            targets |= {name.rpartition(".")[0]} - {"infinity"}
            waiting += [target for target in targets if target in self.files and target not in seen]
        return seen


def imports_of(syntax: ast.AST, package: str = "") -> Iterator[Import]:
    """Every import statement, wherever it stands: at the top, in a function, or for type checking alone."""
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)


def part_of(module: str) -> str:
    """The name after `infinity.`; of infinity/__init__.py, and of a name in it, the empty one."""
    names = module.split(".")[1:3] if module != "infinity_offload" else [module]
    return ".".join(names) if ".".join(names) in FLOORS else "".join(names[:1])


def part_imported(tree: Tree, target: str) -> str | None:
    """The part of the house that an import reaches into; None outside of it."""
    module = tree.module_of(target)
    if module is None:
        return None
    return part_of(target) if part_of(target) in FLOORS else part_of(module)


def floor_violations(tree: Tree) -> list[str]:
    found = []
    for name, imports in tree.imports.items():
        part = part_of(name)
        if part not in FLOORS:
            found.append(
                f"{tree.where(name, 1)}: {name} stands on no floor: place it in FLOORS of {Path(__file__).name}"
            )
            continue
        for target, line in imports:
            other = part_imported(tree, target)
            if other is None or other == part or other not in FLOORS:
                continue
            there, here = FLOORS[other], FLOORS[part]
            if there > here:
                found.append(
                    f"{tree.where(name, line)}: {name} (floor {here}) imports {target} (floor {there}) above it"
                )
            elif there == here != GROUND:
                found.append(f"{tree.where(name, line)}: {name} knows {target}, which is on the same floor ({here})")
    return found


def circles(tree: Tree) -> list[str]:
    """Modules that import each other, straight or through others: one line for each such knot, at its first arrow."""
    arrows = {
        name: {module: line for target, line in reversed(imports) if (module := tree.module_of(target)) in tree.files}
        for name, imports in tree.imports.items()
    }
    found = []
    told: set[str] = set()
    for name in tree.files:
        knot = {other for other in ends(arrows, name) if other != name and name in ends(arrows, other)}
        if knot - told:
            told |= {name, *knot}
            line = min(arrows[name][other] for other in knot if other in arrows[name])
            found.append(f"{tree.where(name, line)}: {name} imports what imports it: {', '.join(sorted(knot))}")
    return found


def ends(arrows: dict[str, dict[str, int]], start: str) -> set[str]:
    """The modules to which arrows lead from `start`, however many."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in arrows[waiting.pop()].keys() - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def schedule_violations(tree: Tree) -> list[str]:
    found = []
    schedule = {name for name in tree.files if part_of(name) == "schedule"}
    for name in sorted(tree.reachable(schedule)):
        for target, line in tree.imports[name]:
            for forbidden in sorted(NEVER_IN_SCHEDULE):
                if target == forbidden or target.startswith(forbidden + "."):
                    way = "" if name in schedule else ", and schedule imports it"
                    found.append(f"{tree.where(name, line)}: {name} imports {forbidden}{way}")
    for name in sorted(schedule):
        for target, line in tree.imports[name]:
            if target.split(".")[0] in IO_MODULES:
                found.append(f"{tree.where(name, line)}: {name} imports {target}, but schedule does no I/O")
        for node in ast.walk(tree.syntax[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IO_CALLS:
                found.append(
                    f"{tree.where(name, node.lineno)}: {name} calls {node.func.id}(), but schedule does no I/O"
                )
    return found


def commands(root: Path) -> dict[str, str]:
    """[project.scripts] of pyproject.toml: command, and `module:function`. Read by hand: tomllib is younger than our
    oldest Python."""
    table = re.search(r"^\[project\.scripts\]\n(.*?)(?=^\[|\Z)", (root / "pyproject.toml").read_text(), re.M | re.S)
    return dict(re.findall(r'^"?([\w-]+)"?\s*=\s*"([\w.]+:\w+)"', table[1], re.M)) if table else {}


def dead_modules(tree: Tree) -> list[str]:
    """Modules to which nothing leads from the public names, the commands, the integrations, the examples or bench/."""
    starts = {"infinity"} | {entry.partition(":")[0] for entry in commands(tree.root).values()}
    starts |= {name for name in tree.files if part_of(name) == "integrations" or name.endswith(".__main__")}
    for folder in ("examples", "bench"):
        for path in sorted((tree.root / folder).rglob("*.py")):
            modules = {tree.module_of(found.target) for found in imports_of(ast.parse(path.read_text(), str(path)))}
            starts |= {module for module in modules if module}
    alive = tree.reachable(starts)
    return [
        f"{tree.where(name, 1)}: {name} is neither imported nor an entry point"
        for name in tree.files
        if name not in alive
    ]


def files_of_repository(root: Path) -> list[Path]:
    """Tracked files, and new ones that are not ignored."""
    command = ["git", "-c", f"safe.directory={root}", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return sorted({root / name for name in listed.split("\0") if name and (root / name).is_file()})


# The folders in which people and build machines keep their checkouts. The character before must not belong to a longer
# path or to an address.
MACHINE_PATH = re.compile(r"(?<![\w.~$}*/-])/(?:(?:home|Users)/\w|(?:root|work|workspace|builds)/)")


def unportable_files(root: Path, paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        name = path.relative_to(root)
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            found.append(f"{name}: a binary file")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: a path of some machine: {line.strip()[:80]}")
    return found


@functools.cache
def our_tree() -> Tree:
    return Tree(ROOT)


def test_imports_go_downward_only() -> None:
    assert floor_violations(our_tree()) == []


def test_no_modules_import_each_other() -> None:
    assert circles(our_tree()) == []


def test_schedule_is_integers_only() -> None:
    assert schedule_violations(our_tree()) == []


def test_no_module_is_dead() -> None:
    assert dead_modules(our_tree()) == []


def test_commands_lead_to_functions() -> None:
    tree = our_tree()
    for command, entry in commands(ROOT).items():
        module, _, function = entry.partition(":")
        assert module in tree.files, f"{command}: there is no {module}"
        names = {name for node in ast.walk(tree.syntax[module]) for name in defined_by(node)}
        assert function in names, f"{command}: {module} has no {function}"


def defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return []


def test_repository_is_text_that_names_no_machine() -> None:
    assert unportable_files(ROOT, files_of_repository(ROOT)) == []


# The checkers themselves, on small trees made to break the rules


@pytest.fixture
def sound_tree(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "pyproject.toml": '[project.scripts]\ninfinity-bench = "infinity.cli.bench:main"\n[tool.x]\ny = "a.b:c"\n',
            "infinity/__init__.py": "LAZY = {'Engine': '.runtime.engine'}\n",
            "infinity/units.py": "",
            "infinity/errors.py": "from infinity import units\n",
            "infinity/aio/__init__.py": "from infinity._aio import probe\nfrom ..errors import IoError\n",
            "infinity/store/arena.py": "from infinity.aio import probe\n",
            "infinity/device/__init__.py": "import torch\n",
            "infinity/schedule/trace.py": "from ..units import KIB\n",
            "infinity/runtime/engine.py": "from ..schedule import trace\nfrom infinity.device import x\n"
            "def start():\n    from infinity.store import arena\n    f'{0:.3f}'\n",
            "infinity/cli/bench.py": "import infinity\n\ndef main(): ...\n",
        },
    )
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []  # pytest imports them as one module


def test_checkers_pass_a_sound_tree(sound_tree: Path) -> None:
    tree = Tree(sound_tree)
    assert floor_violations(tree) == []
    assert circles(tree) == []
    assert schedule_violations(tree) == []
    assert dead_modules(tree) == []
    assert commands(sound_tree) == {"infinity-bench": "infinity.cli.bench:main"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("infinity/store/arena.py", "from infinity.runtime import engine"),
        ("infinity/store/arena.py", "from ..runtime.engine import Engine"),
        ("infinity/store/arena.py", "def late():\n    import infinity.runtime.engine"),
        ("infinity/store/arena.py", "from infinity import Engine"),
        ("infinity/store/arena.py", "from infinity.device import copy"),
        ("infinity/store/arena.py", "LAZY = {'Engine': 'infinity.runtime.engine'}"),
        ("infinity/units.py", "import infinity._aio"),
        ("infinity/attic/old.py", ""),
    ],
)
def test_checker_catches_an_import_that_goes_up(sound_tree: Path, name: str, text: str) -> None:
    write(sound_tree, {name: text + "\n"})
    (violation,) = floor_violations(Tree(sound_tree))
    assert violation.startswith(f"{name}:")


@pytest.mark.parametrize(
    "text",
    [
        "from infinity.store import arena",
        "from .arena import Arena",
        "def late():\n    from infinity.store.arena import Arena",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from infinity.store.arena import Arena",
        "LAZY = {'Arena': '.arena'}",
    ],
)
def test_checker_catches_modules_that_import_each_other(sound_tree: Path, text: str) -> None:
    chain = {"files.py": text + "\n", "arena.py": "from . import layout\n", "layout.py": ""}
    write(sound_tree, {f"infinity/store/{name}": module for name, module in chain.items()})
    assert circles(Tree(sound_tree)) == []
    write(sound_tree, {"infinity/store/layout.py": "from . import files\n"})
    (circle,) = circles(Tree(sound_tree))
    assert circle.endswith("infinity.store.arena imports what imports it: infinity.store.files, infinity.store.layout")


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "from torch import Tensor",
        "from infinity.aio import IoEngine",
        "from infinity import _aio",
        "from infinity.device import x",
        "import os.path",
        "def show():\n    print(1)",
    ],
)
def test_checker_catches_a_scheduler_with_hands(sound_tree: Path, text: str) -> None:
    write(sound_tree, {"infinity/schedule/trace.py": text + "\n"})
    assert schedule_violations(Tree(sound_tree)) != []


def test_checker_catches_dead_modules_that_know_each_other(sound_tree: Path) -> None:
    write(
        sound_tree,
        {"infinity/store/left.py": "from . import right\n", "infinity/store/right.py": "from . import left\n"},
    )
    assert [line.split(":")[0] for line in dead_modules(Tree(sound_tree))] == [
        "infinity/store/left.py",
        "infinity/store/right.py",
    ]
    write(sound_tree, {"examples/train.py": "from infinity.store import left\n"})
    assert dead_modules(Tree(sound_tree)) == []


def test_checker_catches_binary_files_and_paths_of_a_machine(tmp_path: Path) -> None:
    home = "/".join(["", "home", "someone", "data"])
    write(tmp_path, {"a.py": f"PATH = '{home}'\n", "b.md": f"https://example.org{home}, /dev/nvme0n1, /mnt/nvme\n"})
    (tmp_path / "c.bin").write_bytes(b"\x7fELF\0\1")
    (tmp_path / "d.png").write_bytes(b"\x89PNG\r\n")
    found = unportable_files(tmp_path, sorted(tmp_path.iterdir()))
    assert [line.split(":")[0] for line in found] == ["a.py", "c.bin", "d.png"]
