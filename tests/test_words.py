"""The words: none that docs/glossary.md forbids is in prose, identifiers or names. Source is read, never imported.

The glossary's last table is the only list of them. `python tests/test_words.py` prints what is left in the folders that are not
clean yet.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = "docs/glossary.md"
TABLE_HEADING = "## Words we do not use"

SCANNED = ("infinity", "csrc", "docs", "bench", "examples", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".pyi", ".md", ".h", ".cpp", ".inc", ".sh"}

NOT_CLEAN_YET: set[str] = {"infinity/plan"}
"""Folders whose files, without those of folders in them, may still have forbidden words."""

BETWEEN_WORDS = r"[\s#/*]+"
"""A phrase may go on in the next line of a comment."""


class Words(NamedTuple):
    """What the table forbids, in lower case: phrases anywhere in a file, and whole names in Python."""

    everywhere: frozenset[str]
    as_name: frozenset[str]


class Finding(NamedTuple):
    file: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word}"


def forbidden_words(root: Path) -> Words:
    """The rows of the glossary's last table: | `word`, ... | everywhere or as a name | ... |"""
    _, _, section = (root / GLOSSARY).read_text().partition(TABLE_HEADING)
    words: dict[str, set[str]] = {"everywhere": set(), "as a name": set()}
    for row in re.findall(r"^\| (`.*)\|$", section, re.MULTILINE):
        terms, scope, _ = (cell.strip() for cell in row.split("|"))
        words[scope].update(re.findall(r"`([^`]+)`", terms))
    return Words(frozenset(words["everywhere"]), frozenset(words["as a name"]))


def plain(text: str) -> str:
    """`text` in lower case with the words of its identifiers apart, line for line."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


def words_in_text(text: str, words: Words) -> Iterator[tuple[int, str]]:
    """The line of each forbidden word or phrase in prose and identifiers, and the word."""
    spaced = plain(text)
    phrases = "|".join(BETWEEN_WORDS.join(map(re.escape, phrase.split())) for phrase in sorted(words.everywhere))
    for match in re.finditer(rf"(?<![a-z])(?:{phrases})(?![a-z])", spaced):
        yield spaced.count("\n", 0, match.start()) + 1, " ".join(re.split(BETWEEN_WORDS, match.group()))


def names_bound(source: str) -> Iterator[tuple[int, str]]:
    """The line of every function, class, argument, variable and attribute that Python `source` makes, and its name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case _:
                pass


def findings(root: Path, words: Words) -> Iterator[Finding]:
    """Every forbidden word under `root`."""
    for path in sorted(path for name in SCANNED for path in [root / name, *(root / name).rglob("*")]):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        name, text = str(path.relative_to(root)), path.read_text()
        if name == GLOSSARY:
            text = text.partition(TABLE_HEADING)[0]
        for line, word in words_in_text(text, words):
            yield Finding(name, line, word)
        if path.suffix == ".py":
            for line, bound in names_bound(text):
                if bound.strip("_").lower() in words.as_name:
                    yield Finding(name, line, f"{bound} as a name")


def is_clean(finding: Finding) -> bool:
    return str(Path(finding.file).parent) not in NOT_CLEAN_YET


def test_no_forbidden_word_is_used() -> None:
    violations = [str(finding) for finding in findings(ROOT, forbidden_words(ROOT)) if is_clean(finding)]
    assert violations == [], f"{GLOSSARY} names another word for each of these"


# The checker itself, on small trees

TABLE = f"""# Glossary
A shelf in prose.

{TABLE_HEADING}

| Word | Forbidden | Say |
|---|---|---|
| `shelf`, `shelves` | everywhere | store |
| `hand over` | everywhere | give |
| `rest` | as a name | remaining |
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, GLOSSARY, TABLE.replace("A shelf in prose.", ""))
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def findings_in(root: Path) -> list[str]:
    return [str(finding) for finding in findings(root, forbidden_words(root))]


def test_the_glossary_forbids_words_of_both_kinds() -> None:
    words = forbidden_words(ROOT)
    assert {"landing", "hand over", "surprises"} <= words.everywhere
    assert {"together", "halves", "found", "what"} <= words.as_name


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("infinity/swap/a.py", "x = 1\n# On its shelf.\n", ":2: shelf"),
        ("infinity/swap/a.py", "SHELVES = 1\n", ":1: shelves"),
        ("infinity/swap/a.py", "def open_shelf_door(): ...\n", ":1: shelf"),
        ("infinity/swap/a.py", "class TopShelfDoor: ...\n", ":1: shelf"),
        ("infinity/swap/a.py", "# FSDP2 must hand\n# over what it has\n", ":1: hand over"),
        ("infinity/a.py", "rest = 1\n", ":1: rest as a name"),
        ("infinity/a.py", "def f(self, rest): ...\n", ":1: rest as a name"),
        ("infinity/a.py", "for _rest in []: ...\n", ":1: _rest as a name"),
        ("bench/a.py", "def f(self):\n    self._rest = 1\n", ":2: _rest as a name"),
        ("csrc/aio/a.h", "// hand_over()\n", ":1: hand over"),
        ("docs/page.md", "In the shelf.\n", ":1: shelf"),
        ("README.md", "Shelf\n", ":1: shelf"),
        ("infinity/a.py", "def shelf_numel(): ...\n", ":1: shelf"),
    ],
)
def test_checker_finds_a_forbidden_word(tree: Path, file: str, text: str, expected: str) -> None:
    write(tree, file, text)
    assert findings_in(tree) == [file + expected]


@pytest.mark.parametrize(
    "text",
    [
        "# A bookshelf, shelfmark.\n",
        "# It hands something else, over there.\n",
        '"""Parameters rest on NVMe, the rest of them at rest."""\n',
        "def is_at_rest(): ...\n",
        "restore = interest = 1\n",
    ],
)
def test_checker_passes_plain_english(tree: Path, text: str) -> None:
    write(tree, "infinity/swap/a.py", text)
    assert findings_in(tree) == []


def test_checker_reads_the_glossary_but_not_its_table(tree: Path) -> None:
    write(tree, GLOSSARY, TABLE)
    assert findings_in(tree) == [f"{GLOSSARY}:2: shelf"]


def main() -> None:
    left = [finding for finding in findings(ROOT, forbidden_words(ROOT)) if not is_clean(finding)]
    for finding in left:
        print(finding)
    print()
    for folder in sorted(NOT_CLEAN_YET - {str(Path(finding.file).parent) for finding in left}):
        print(f"clean: take it out of NOT_CLEAN_YET: {folder}")
    for file, count in sorted(Counter(finding.file for finding in left).items()):
        print(f"{count:4}  {file}")


if __name__ == "__main__":
    main()
