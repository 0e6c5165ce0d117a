"""What a drive profile promises: it comes back as it was written, is found from below, and never stops a run."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from infinity.aio import IoEngine, PinnedPool
from infinity.drive import choice as module
from infinity.drive.choice import FILE_NAME, VERSION, DriveProfile, load_profile, save_profile

PROFILE = DriveProfile(
    written="2026-11-21T10:00:00+0000",
    path="/nvme",
    drive="nvme0n1 (Fast One, 1.82 TiB)",
    backend="io_uring",
    block_bytes=1 << 20,
    queue_depth=32,
    rings=2,
    mix="bursts",
    read_bytes_per_s=3.5e9,
    write_bytes_per_s=2.5e9,
    mixed_bytes_per_s=3e9,
    cpu_seconds_per_gib=0.005,
)


def test_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = save_profile(PROFILE, tmp_path)
    assert path == tmp_path / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o644
    assert load_profile(tmp_path) == PROFILE
    assert json.loads(path.read_text())["version"] == VERSION


def test_a_second_one_replaces_the_first_and_leaves_no_other_file(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path)
    second = replace(PROFILE, queue_depth=64)
    save_profile(second, tmp_path)
    assert load_profile(tmp_path) == second
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_failure_to_write_leaves_the_old_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(PROFILE, tmp_path)

    def fail(handle: int) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        save_profile(replace(PROFILE, rings=4), tmp_path)
    assert load_profile(tmp_path) == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_is_found_from_folders_below_even_if_they_are_still_to_be_made(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path)
    below = tmp_path / "a" / "b"
    assert load_profile(below) == PROFILE
    below.mkdir(parents=True)
    assert load_profile(below) == PROFILE
    nearer = replace(PROFILE, rings=4)
    save_profile(nearer, tmp_path / "a")
    assert load_profile(below) == nearer


def test_absent_is_none(tmp_path: Path) -> None:
    assert load_profile(tmp_path) is None


def test_another_file_system_above_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(PROFILE, tmp_path)
    (tmp_path / "mount").mkdir()
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = real(self, **options)
        if self != tmp_path / "mount":
            return found
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

    monkeypatch.setattr(Path, "stat", stat)
    assert load_profile(tmp_path / "mount") is None
    assert load_profile(tmp_path) == PROFILE


def damaged(**changes: object) -> str:
    return json.dumps(asdict(PROFILE) | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "can't be read"),
        ("{", "can't be read"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ("null", "damaged"),
        ("[" * 100_000, "can't be read"),
        ("\udcff", "can't be read"),
        (damaged(version=VERSION + 1), "newer"),
        (damaged(version=VERSION + 1, backend=None), "newer"),
        (damaged(version=0), "damaged"),
        (damaged(block_bytes=1000), "block_bytes"),
        (damaged(block_bytes=0), "block_bytes"),
        (damaged(block_bytes="1MiB"), "block_bytes"),
        (damaged(queue_depth=0), "queue_depth"),
        (damaged(rings=True), "rings"),
        (damaged(read_bytes_per_s=-1.0), "read_bytes_per_s"),
        (damaged(mixed_bytes_per_s=float("nan")), "mixed_bytes_per_s"),
        (damaged(backend=7), "backend"),
    ],
)
def test_damaged_or_newer_is_ignored_and_named(
    tmp_path: Path, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(text.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING, logger="infinity"):
        assert load_profile(tmp_path) is None
    (record,) = caplog.records
    assert str(tmp_path / FILE_NAME) in record.getMessage()
    assert reason in record.getMessage()
    assert "infinity-bench sweep" in record.getMessage()


def test_one_that_is_no_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).mkdir()
    assert load_profile(tmp_path) is None
    assert FILE_NAME in caplog.text


def test_keys_that_a_later_release_may_add_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(damaged(colour="blue"))
    assert load_profile(tmp_path) == PROFILE
    assert module.VERSION == 1


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    st.binary(max_size=100)
    | st.dictionaries(
        st.sampled_from(sorted(asdict(PROFILE))),
        st.none() | st.integers() | st.floats() | st.text(max_size=10) | st.lists(st.integers(), max_size=2),
    ).map(lambda changes: damaged(**changes).encode())
)
def test_whatever_it_holds_it_is_a_sound_profile_or_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    found = load_profile(tmp_path)
    if found is not None:
        IoEngine(
            PinnedPool(1 << 20),
            backend="threads",
            block_bytes=found.block_bytes,
            queue_depth=min(found.queue_depth, 8),
            rings=min(found.rings, 2),
            mix=found.mix,
        ).close()
        assert found.queue_depth <= 4096 and found.rings <= 64


def test_a_pipe_a_link_and_a_giant_are_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE_NAME
    os.mkfifo(path)
    assert load_profile(tmp_path) is None
    path.unlink()
    path.symlink_to("/dev/zero")
    assert load_profile(tmp_path) is None
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert load_profile(tmp_path) is None
    assert all(reason in caplog.text for reason in ("not a regular file", "symbolic link", "more than 1.00 MiB"))
