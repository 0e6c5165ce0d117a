#!/usr/bin/env python3
"""`make docs`: README.md, docs/ and what they link to as a site, with a picture of a training step that is taken for it here.

The site has the layout of the repository, so one link serves both. Everything is made in a folder of its own and put into
place when it is whole: a build that fails or is interrupted leaves what was there.

[Note: Anchors] Headings get the anchors that a repository's own pages give them, so that here too one link serves both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "docs"
# What is on the site. A link to anything else fails the build.
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "docs/pictures/*.svg",
    "tools/site.css",
    "csrc/*/README.md",
    "infinity/*/README.md",
    "bench/results/*",
)
PICTURE_PAGE = "docs/timeline.md"
PICTURE_HERE = "<!-- On the site that `make docs` builds, a picture of a step stands here. -->"
# Few tokens, so that the compute of a small machine does not hide the drive.
STEP = ("--batch-size", "4", "--seq", "64", "--warmup", "1", "--steps", "1", "--clipping", "0")


class DocsError(Exception):
    """Why there is no site, and what to do about it."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the docs as a site, in build/docs.")
    parser.add_argument(
        "--nvme-path", type=Path, default=ROOT / ".nvme", help="where the step is taken (default: .nvme)"
    )
    parser.add_argument("--params", default="40M", help="size of the model that takes it (default: 40M)")
    parser.add_argument(
        "--no-picture", action="store_true", help="without the step; a second or two instead of half a minute"
    )
    asked = parser.parse_args(argv)
    try:
        with folder(SITE.parent), tempfile.TemporaryDirectory(dir=SITE.parent, prefix=".docs-") as scratch:
            pages, new = Path(scratch, "pages"), Path(scratch, "site")
            copy_pages(pages)
            if not asked.no_picture:
                say(f"taking a step of {asked.params} parameters in {asked.nvme_path}, for its picture")
                put_picture(pages, take_step(asked.params, asked.nvme_path.resolve(), Path(scratch, "step.json")))
            build(pages, new)
            if SITE.exists():
                SITE.rename(Path(scratch, "old"))
            new.rename(SITE)
    except (DocsError, OSError) as error:
        print(f"docs: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndocs: interrupted; nothing changed", file=sys.stderr)
        return 130
    say(f"read them at {SITE / 'index.html'}")
    return 0


def copy_pages(to: Path) -> None:
    """What PAGES names, laid out in `to` as it is in the repository."""
    for pattern in PAGES:
        for file in ROOT.glob(pattern):
            copy = to / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            if copy.suffix == ".md":
                copy.write_text(align_numbers(copy.read_text()))


def align_numbers(text: str) -> str:
    """The page with every column of a table but the first on the right whose cells all begin with a digit, or are empty."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|( ?-{3,} ?\|)+\n", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[number + 1 :])
            columns = zip(*([cell.strip() for cell in row.strip("|\n ").split("|")] for row in rows), strict=False)
            ways = ["---:" if place and _is_figures(cells) else "---" for place, cells in enumerate(columns)]
            ways += ["---"] * (line.count("|") - 1 - len(ways))
            lines[number] = f"| {' | '.join(ways)} |\n"
    return "".join(lines)


def _is_figures(cells: Sequence[str]) -> bool:
    figures = [cell for cell in cells if cell not in ("", "–")]
    return any(cells) and all(re.match(r"[<≈−-]? ?\d", cell) and len(cell) < 20 for cell in figures)


# The picture


def take_step(params: str, nvme_path: Path, trace: Path) -> dict[str, Any]:
    """Trace a step into the file `trace`. Returns what `infinity-bench step --json` says of it; raises DocsError."""
    bench = "import sys; from infinity.cli.bench import main; sys.exit(main())"
    where = (str(nvme_path), "--trace", str(trace), "--json", "-")
    with folder(nvme_path):
        done = run([sys.executable, "-c", bench, "step", "--params", params, *STEP, *where])
    if done.returncode != 0:
        raise DocsError(
            f"no step of {params} parameters could be traced in {nvme_path}: {last_line(done)}\n"
            'docs: another drive is ARGS="--nvme-path FOLDER", a smaller model ARGS="--params 10M"'
        )
    taken: dict[str, Any] = json.loads(done.stdout) | {"file": trace}
    return taken


def put_picture(pages: Path, taken: dict[str, Any]) -> None:
    """Draw the traced step next to the page on timelines; show it there with its machine."""
    page = pages / PICTURE_PAGE
    text = page.read_text()
    if text.count(PICTURE_HERE) != 1:
        raise DocsError(f"{PICTURE_PAGE} has no place for the picture: one line of it must be\n{PICTURE_HERE}")
    picture = page.with_name("step.png")
    done = run([sys.executable, str(ROOT / "bench" / "render_timeline.py"), str(taken["file"]), str(picture)])
    if done.returncode != 0:
        raise DocsError(f"the step could not be drawn: {last_line(done)}")
    shown = f"[![The rows of one step]({picture.name})]({picture.name})\n\n{caption(taken)}"
    page.write_text(text.replace(PICTURE_HERE, shown))


def caption(taken: dict[str, Any]) -> str:
    """One sentence: what is shown, and on which machine it was taken."""
    here, drive = runpy.run_path(str(ROOT / "bench" / "results.py"))["machine"](), taken["drive"]
    return (
        f"One step of a transformer of {taken['params'] / 1e6:.1f} M parameters ({taken['layers']} layers of hidden size "
        f"{taken['hidden']}) on {taken['batch_size']} × {taken['seq']} tokens, not clipped, updated in the {taken['update']}, "
        f"taken when this page was built, {here['date']}, on {here['cpu']} with a drive of "
        f"{drive['read_bytes_per_s'] / 1e9:.1f} GB/s read and {drive['write_bytes_per_s'] / 1e9:.1f} GB/s written, through "
        f"{drive['backend']}."
    )


# The site


def build(pages: Path, site: Path) -> None:
    """Make the site of `pages`. Raises DocsError, after saying which, where links or anchors lead nowhere."""
    try:
        from mkdocs.commands.build import build as build_site
        from mkdocs.config import load_config
        from mkdocs.exceptions import MkDocsException
    except ModuleNotFoundError as error:
        raise DocsError(f"{error}: make docs installs it") from None

    logging.basicConfig(level=logging.WARNING, format="docs: %(message)s")
    try:
        config = load_config(str(ROOT / "tools" / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(site))
        config.mdx_configs["toc"]["slugify"] = anchor_of
        build_site(config)
    except MkDocsException as error:
        raise DocsError(f"the site could not be built: {error}") from None


def anchor_of(heading: str, separator: str = "-") -> str:
    """[Note: Anchors]"""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


# Small things


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """`path` exists in the body. What was made for that is removed again, as far as nothing lies in it."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return next(reversed(done.stderr.strip().splitlines()), f"exit status {done.returncode}")


def say(line: str) -> None:
    print(f"docs: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
