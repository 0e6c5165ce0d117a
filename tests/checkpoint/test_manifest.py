"""The manifest is a file that anybody may have written: it is parsed to what it says, or refused in words."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from infinity.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    StoredFile,
    damage,
    find_checkpoint,
    load_manifest,
)
from infinity.errors import CheckpointError
from infinity.store.files import parse_json

HASH = "0" * 64
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def manifest(**changes: Any) -> dict[str, Any]:
    made = Manifest(saved="2026-11-21", global_steps=3, ranks=2, files={"a.distcp": StoredFile(5, HASH)})
    return {**json.loads(made.to_json()), **changes}


@hypothesis.given(
    st.builds(
        Manifest,
        saved=st.text(),
        global_steps=st.integers(0, 2**62),
        ranks=st.integers(1, 2**31),
        files=st.dictionaries(
            st.from_regex(r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True),
            st.builds(StoredFile, st.integers(0, 2**62), st.from_regex(r"[0-9a-f]{64}", fullmatch=True)),
            max_size=5,
        ),
        aliases=st.dictionaries(st.text(), st.text(), max_size=3),
        buffers=st.lists(st.text(), max_size=3),
    )
)
def test_what_is_written_is_read(made: Manifest) -> None:
    assert parse_json(Manifest, made.to_json()) == made


@pytest.mark.inputs
@hypothesis.given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_anything_else_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(Manifest, content)


@pytest.mark.inputs
@hypothesis.given(st.sampled_from(sorted(manifest())), VALUES)
def test_a_changed_field_is_refused_or_keeps_its_type(field: str, value: Any) -> None:
    with contextlib.suppress(ValueError):
        parsed = parse_json(Manifest, json.dumps(manifest(**{field: value})).encode())
        assert type(getattr(parsed, field)) is type(
            getattr(parse_json(Manifest, json.dumps(manifest()).encode()), field)
        )


@pytest.mark.inputs
@hypothesis.given(st.data())
def test_changed_bytes_are_refused_or_a_manifest(data: st.DataObject) -> None:
    content = bytearray(json.dumps(manifest()).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        assert isinstance(parse_json(Manifest, bytes(content)), Manifest)


@pytest.mark.parametrize("name", ["../a", "a/b", "/etc/passwd", "..", ".", "", "a\0b", "a\n", "x" * 300])
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse_json(Manifest, json.dumps(manifest(files={name: {"nbytes": 1, "sha256": HASH}})).encode())


def test_what_is_no_json_is_told_without_a_place() -> None:
    with pytest.raises(ValueError, match=r"^Invalid JSON"):
        parse_json(Manifest, b"{")
    with pytest.raises(ValueError, match=r"^ranks: "):
        parse_json(Manifest, json.dumps(manifest(ranks="two")).encode())


def test_a_deep_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(Manifest, b"[" * 100_000)


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) is None
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(.*Field required"):
        load_manifest(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_manifest(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="symbolic link"):
        load_manifest(tmp_path)


def test_progress_is_told_of_every_byte_whatever_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "pipe").symlink_to("/dev/zero")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    files = {"good": StoredFile(0, empty), "short": StoredFile(9, HASH), "pipe": StoredFile(7, HASH)}
    files["gone"] = StoredFile(4, HASH)
    made = Manifest(saved="", global_steps=0, ranks=1, files=files)
    told: list[int] = []
    wrong = dict(damage(tmp_path, made, progress=told.append))
    assert wrong.keys() == {"short", "pipe", "gone"}
    assert sum(told) == made.nbytes


@pytest.mark.parametrize("text", ["", "..", "a/b", "/", "\0", "x" * 5000])
def test_a_latest_that_names_no_folder_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"damaged|can't be read"):
        find_checkpoint(tmp_path)
