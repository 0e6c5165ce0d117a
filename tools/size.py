"""Count the lines and the dialect words of each room.

    python tools/size.py            print both per room, the totals, and the largest classes and functions
    python tools/size.py --lower    write the counts to tools/ceilings.json where they are lower

tests/test_ceilings.py fails if a count is above its ceiling. A change that removes lines or words lowers the ceiling.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tools" / "ceilings.json"
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".inc"}
PROSE = {".md", ".sh"}
DIALECT = re.compile(
    r"\b(nobody|somebody|whoever|beside|anew|rests|is told|goes on|gone on)\b|\bwhat is \w+( \w+)? is\b", re.IGNORECASE
)
"""Words that this code uses where the field has a plainer one."""
CORE = ("infinity/swap", "infinity/schedule", "infinity/fsdp2", "infinity/store")


def room_of(name: str) -> str:
    """The folder that a file counts for: two levels deep in infinity/ and csrc/, one elsewhere."""
    parts = Path(name).parts
    return "/".join(parts[:2]) if parts[0] in ("infinity", "csrc") and len(parts) > 2 else parts[0]


def lines_by_room() -> Counter[str]:
    """Lines of the files that git tracks, by room."""
    lines: Counter[str] = Counter()
    for path in _sources():
        lines[room_of(str(path.relative_to(ROOT)))] += path.read_text().count("\n")
    return lines


def dialect_by_room() -> Counter[str]:
    """Uses of the dialect words, in documentation too, by room; this file, which lists them, does not count."""
    words: Counter[str] = Counter()
    for path in _sources(SUFFIXES | PROSE):
        if path == Path(__file__).resolve():
            continue
        words[room_of(str(path.relative_to(ROOT)))] += len(DIALECT.findall(path.read_text()))
    return words


def totals(lines: Counter[str]) -> dict[str, int]:
    """The lines that have a ceiling: of the product (infinity/ and csrc/) and of its core."""
    return {
        "product": sum(count for room, count in lines.items() if room.startswith(("infinity", "csrc"))),
        "core": sum(lines[room] for room in CORE),
    }


def largest(kind: type[ast.AST], count: int) -> list[tuple[int, str]]:
    """The longest classes or functions of infinity/, with their lines."""
    found = []
    for path in _sources():
        name = str(path.relative_to(ROOT))
        if path.suffix == ".py" and name.startswith("infinity/"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, kind):
                    found.append((node.end_lineno - node.lineno + 1, f"{name}:{node.name}"))  # type: ignore[attr-defined]
    return sorted(found, reverse=True)[:count]


def _sources(suffixes: set[str] = SUFFIXES) -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix in suffixes and path.is_file():
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write lower totals to tools/ceilings.json")
    lower = parser.parse_args().lower
    lines, words = lines_by_room(), dialect_by_room()
    print("  lines  dialect words")
    for room, count in lines.most_common():
        print(f"{count:7} {words[room]:5}  {room}")
    print(", ".join(f"{name}: {count}" for name, count in totals(lines).items()))
    for kind in (ast.ClassDef, ast.FunctionDef):
        print(*(f"{count:7}  {name}" for count, name in largest(kind, 8)), sep="\n")
    if lower:
        ceilings = json.loads(CEILINGS.read_text())
        ceilings["lines"] = {name: min(count, ceilings["lines"][name]) for name, count in totals(lines).items()}
        ceilings["dialect"] = {
            room: min(count, ceilings["dialect"].get(room, 0)) for room, count in sorted(words.items()) if count
        }
        CEILINGS.write_text(json.dumps(ceilings, indent=2) + "\n")


if __name__ == "__main__":
    main()
