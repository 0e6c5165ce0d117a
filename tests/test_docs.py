"""What the docs promise: every link leads somewhere, in the repository and on the site, and every note that they cite is in the
code; and the site that `make docs` builds shows the step that was traced for it, or is not built."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import infinity

ROOT = Path(__file__).resolve().parent.parent

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
NOTE = re.compile(r"\[Note:\s([^]]*)\]")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "tools" / "build_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = load()


def anchors_of(page: Path) -> set[str]:
    """Code has no headings, but a heading may have code in it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {docs.anchor_of(heading) for heading in HEADING.findall(text)}


def broken_links(root: Path) -> Iterator[str]:
    """Links between the pages under `root` that lead to no file there, or to no heading of it."""
    for page in sorted(root.rglob("*.md")):
        for link in LINK.findall(CODE.sub("", page.read_text())):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.is_file() or (anchor and anchor not in anchors_of(target)):
                yield f"{page.relative_to(root)}: {link}"


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    docs.copy_pages(tmp_path / "pages")
    return tmp_path / "pages"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site that was built before."""
    site = tmp_path / "build" / "docs"
    site.mkdir(parents=True)
    (site / "index.html").write_text("the one before")
    monkeypatch.setattr(docs, "SITE", site)
    return site


def break_link(pages: Path, link: str) -> None:
    page = pages / "docs" / "plan.md"
    page.write_text(page.read_text() + f"\n[somewhere]({link})\n")


CODE_SUFFIXES = {".py", ".h", ".cpp", ".inc"}
BROKEN = ["architecture.md#the-summ", "../README.txt", "#nowhere", "../csrc/aio", "/docs/plan.md"]


def test_all_links_lead_somewhere(pages: Path) -> None:
    assert list(broken_links(pages)) == []
    listed = (ROOT / "tools" / "mkdocs.yml").read_text()
    assert [name for page in pages.rglob("*.md") if f": {(name := str(page.relative_to(pages)))}\n" not in listed] == []


def test_every_note_that_is_cited_is_written(pages: Path) -> None:
    code = [file for room in ("infinity", "csrc") for file in (ROOT / room).rglob("*") if file.suffix in CODE_SUFFIXES]
    written = {" ".join(name.split()) for file in code for name in NOTE.findall(file.read_text())}
    cited = {" ".join(name.split()) for page in pages.rglob("*.md") for name in NOTE.findall(page.read_text())}
    assert written and cited - written - {"..."} == set()


def test_the_quickstart_shows_the_program_that_is_run() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "quickstart.md").read_text(), re.M | re.S)
    assert shown == (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.parametrize("link", BROKEN)
def test_checker_catches_a_broken_link(pages: Path, link: str) -> None:
    break_link(pages, link)
    assert list(broken_links(pages)) == [f"docs/plan.md: {link}"]


def test_every_page_is_on_the_site(pages: Path, tmp_path: Path) -> None:
    pytest.importorskip(
        "mkdocs", reason="mkdocs is missing (make setup-docs): links are checked by the tests above alone"
    )
    docs.build(pages, tmp_path / "site")
    built = {str(page.relative_to(tmp_path / "site")) for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "CONTRIBUTING.html", "docs/timeline.html", "csrc/aio/index.html"} <= built
    assert 'href="docs/plan.html"' in (tmp_path / "site" / "index.html").read_text()
    shown = "".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert re.findall(r'(?:src|<link[^>]*href)="http[^"]*"', shown) == [], "a page fetches something from the network"


@pytest.mark.parametrize("link", BROKEN)
def test_a_broken_link_fails_the_site(pages: Path, tmp_path: Path, link: str) -> None:
    pytest.importorskip(
        "mkdocs", reason="mkdocs is missing (make setup-docs): links are checked by the tests above alone"
    )
    break_link(pages, link)
    with pytest.raises(docs.DocsError, match="1 warnings in strict mode"):
        docs.build(pages, tmp_path / "site")


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("The same as numbers", "the-same-as-numbers"),
        ("csrc/aio: bytes, moved", "csrcaio-bytes-moved"),
        ("`T_step` – at least", "t_step--at-least"),
    ],
)
def test_headings_have_the_anchors_of_a_repository(heading: str, anchor: str) -> None:
    assert docs.anchor_of(heading) == anchor


def test_figures_stand_on_the_right() -> None:
    head = "| what | step | read | what else |\n"
    rows = "| 8B | 53 s | – | 3 of them, and all that they need |\n| all | 6.4 min | 12 GB | |\n"
    aligned = docs.align_numbers(f"{head}|---|---|---|---|\n{rows}")
    assert aligned == f"{head}| --- | ---: | ---: | --- |\n{rows}"


def test_the_page_of_the_api_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: infinity\.(\w+)$", text, re.MULTILINE))
    left_out = {
        "__version__",
        "DeepSpeedEngine",
        "accelerator",
        "checkpointing",
        "comm",
        "get_accelerator",
        "moe",
        "ops",
        "pipe",
        "utils",
        "zero",
    }
    assert shown == {*infinity.__all__} - left_out


def test_the_picture_of_losses_shows_the_last_result_and_no_unequal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])  # the program extends it, too
    learned = importlib.import_module("learned")
    line = learned.last_result()
    assert learned.PICTURE.read_text() == learned.picture(line)
    with pytest.raises(infinity.InfinityError, match="2 losses differ"):
        learned.picture({**line, "unequal_losses": 2})


def test_troubleshooting_quotes_the_errors_that_there_are() -> None:
    """Words of a symptom in code, up to what differs from case to case, stand in the source."""
    code = " ".join(file.read_text() for file in (ROOT / "infinity").rglob("*.py"))
    code = re.sub(r"\"\s+f?\"|'\s+f?'|\"\s+f?'|'\s+f?\"", "", code)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    symptoms = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and "`" in line]
    quoted = [
        part
        for line in symptoms
        for words in re.findall(r"`([^`]+)`", line)
        for part in re.split(r" ?\.\.\.,? ?|[()]", words)
    ]
    missing = [part for part in quoted if len(part.split()) > 2 and part not in code]
    assert missing == []


def a_step(folder: Path) -> dict[str, Any]:
    """What `take_step` returns, without a step."""
    rows = ["drive 0 read", "drive 0 write", "step", "compute"]
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
        for row, name in enumerate(rows)
    ]
    for row in range(len(rows)):
        events.append({"name": "forward", "ph": "X", "pid": 0, "tid": row, "ts": 2e5 * row, "dur": 1e5})
    (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    drive = {"backend": "io_uring", "read_bytes_per_s": 3e9, "write_bytes_per_s": 5e9}
    shape = {"params": 40_000_000, "layers": 10, "hidden": 576, "batch_size": 4, "seq": 64, "update": "forward"}
    return {**shape, "drive": drive, "file": folder / "trace.json"}


def test_the_picture_comes_into_its_page_with_its_machine(pages: Path, tmp_path: Path) -> None:
    before = (pages / "docs" / "timeline.md").read_text()
    docs.put_picture(pages, a_step(tmp_path))
    text = (pages / "docs" / "timeline.md").read_text()
    assert "](step.png)" not in before and "](step.png)" in text
    assert "40.0 M parameters" in text and "3.0 GB/s read" in text
    assert (pages / "docs" / "step.png").read_bytes().startswith(b"\x89PNG")
    assert list(broken_links(pages)) == []
    (pages / "docs" / "timeline.md").write_text("no place")
    with pytest.raises(docs.DocsError, match="has no place for the picture"):
        docs.put_picture(pages, a_step(tmp_path))


@pytest.mark.parametrize(
    ("start", "end", "shares", "parts"),
    [
        (0.05, 0.25, ["0.050 s \u200725%", "0.050 s \u200725%", "0.000 s \u2007\u20070%"], []),
        (0.35, 0.55, ["0.000 s \u2007\u20070%"] * 3, ["forward"]),
    ],
)
def test_a_picture_counts_what_it_shows(
    tmp_path: Path, start: float, end: float, shares: list[str], parts: list[str]
) -> None:
    picture = tmp_path / "step.svg"
    render = [sys.executable, str(ROOT / "bench" / "render_timeline.py"), str(a_step(tmp_path)["file"]), str(picture)]
    drawn = docs.run([*render, "--from", str(start), "--to", str(end)])
    assert drawn.returncode == 0, drawn.stderr
    letters = re.findall("<!-- (.*) -->", picture.read_text())
    assert [each for each in letters if each.endswith("%")] == shares
    assert [each for each in letters if each in ("forward", "backward", "step")] == parts
    assert f"of {end - start:.3f} s" in letters


@pytest.mark.parametrize(
    ("path", "params", "reason"),
    [("drive/folder", "1", "no step of 1 parameters could be traced in"), ("file", "40M", "File exists")],
)
def test_without_a_step_there_is_no_new_site(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, params: str, reason: str
) -> None:
    (tmp_path / "file").touch()
    assert docs.main(["--nvme-path", str(tmp_path / path), "--params", params]) == 1
    assert "docs: error: " in (error := capsys.readouterr().err) and reason in error
    assert [str(each.relative_to(tmp_path)) for each in sorted(tmp_path.rglob("*"))] == [
        "build", "build/docs", "build/docs/index.html", "file",
    ]  # fmt: skip
    assert (site / "index.html").read_text() == "the one before"


def test_an_interrupt_leaves_what_was_there(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str]) -> None:
        assert path.is_dir()
        raise KeyboardInterrupt

    path = tmp_path / "drive" / "folder"
    monkeypatch.setattr(docs, "run", interrupted)
    assert docs.main(["--nvme-path", str(path)]) == 130
    assert not path.parent.exists() and list(site.parent.iterdir()) == [site]
    assert (site / "index.html").read_text() == "the one before"


def machines_page() -> ModuleType:
    """tools/make_machines_page.py."""
    spec = importlib.util.spec_from_file_location("machines", ROOT / "tools" / "make_machines_page.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(asked, marks=pytest.mark.long if asked.preset in ("laptop", "dgx-a100", "8xh200-gen5") else ())
        for asked in machines_page().MACHINES
    ],
    ids=lambda asked: f"{asked.nodes} {asked.preset}",
)
def test_machines_are_as_the_plan_says(asked: Any) -> None:
    page = (ROOT / "docs" / "machines.md").read_text()
    assert "\n".join(machines_page().section(asked)) in page, "python tools/make_machines_page.py > docs/machines.md"


def test_the_page_of_machines_names_the_hardware_that_was_tried() -> None:
    page = (ROOT / "docs" / "machines.md").read_text()
    assert machines_page().HEAD in page and page.endswith(machines_page().FOOT + "\n")
    assert "really tried" in page
