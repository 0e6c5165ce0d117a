"""The doctor's checks of the path: the folder, the drive under it, and a trial that writes and reads back there."""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.cli.doctor.findings import Mark, Section, count_text, kib_text, size_text
from infinity.cli.program import signals_held
from infinity.drive.describe import LOCAL, Drive, Queue, default_block_bytes, drive_of, existing
from infinity.schedule.scheme import Scheme
from infinity.units import GIB, MIB, PAGE_BYTES, format_bytes, format_count

TRIAL_BYTES = 8 * MIB


def check_path(section: Section, path: Path) -> None:
    from infinity.store.run_folder import free_bytes

    section.facts = {"path": str(path), "usable": False, "free_bytes": None, "total_bytes": None, "free_files": None}
    if (refused := refusal(path)) is not None:
        section.add("folder", Mark.FAIL, *refused)
        return
    section.add("folder", Mark.OK, str(path))
    free = free_bytes(path)
    status = os.statvfs(path)
    total = status.f_blocks * status.f_frsize
    counts_files = status.f_files > 0
    section.facts |= {"free_bytes": free if total else None, "total_bytes": total or None}
    section.facts["free_files"] = status.f_favail if counts_files else None
    move = "remove files there, or name a folder on another drive"
    if free < TRIAL_BYTES + MIB:
        text = f"no space: {format_bytes(free)} of {format_bytes(total)} are free, and the trial alone takes more"
        section.add("space", Mark.FAIL, text, move)
    elif not total:
        section.add("space", Mark.INFO, "this file system does not report its free space")
    else:
        state_bytes = Scheme().state_bytes
        parameters = format_count(free // state_bytes)
        text = f"{format_bytes(free)} of {format_bytes(total)} are free: room for {parameters} parameters"
        section.warn_if(free < GIB, "space", f"{text} at {state_bytes:g} bytes each", move)
    if counts_files and status.f_favail < 8:
        section.add("files", Mark.FAIL, "the file system can't hold another file (no inodes are free)", move)
    section.facts["usable"] = all(finding.mark is not Mark.FAIL for finding in section.findings)


def refusal(path: Path) -> tuple[str, str] | None:
    """Return why `path` can't be written to, and what to do; None if nothing shows without trying."""
    another = "or name another folder"
    try:
        status = path.stat()
    except FileNotFoundError:
        return f"{path} does not exist", f"mkdir -p {shlex.quote(str(path))}, {another}"
    except OSError as error:
        return f"{path} can't be reached: {error.strerror}", f"correct the path, {another}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder", "name a folder for swap files"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return f"{path} is mounted read-only", f"mount it read-write, {another}"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} is not writable for this user", f"change its owner, {another}"
    return None


def check_drive(section: Section, path: Path) -> None:
    drive = drive_of(existing(path))
    block_bytes = default_block_bytes(drive)
    section.facts = asdict(drive) | {"model": drive.model, "identity": drive.identity, "block_bytes": block_bytes}
    options = ", ".join(drive.mount_options)
    text = f"{drive.file_system} on {drive.source}, mounted at {drive.mount_point} ({options})"
    why = drive.file_system_weakness
    section.warn_if(bool(why), "file_system", text + (f"; it {why}" if why else ""), LOCAL)
    for layer in drive.layers:
        encrypted = "(CRYPT" in layer
        text = layer + (": encryption costs CPU for every byte" if encrypted else "")
        move = "use an unencrypted partition if the data may be stored on one"
        section.warn_if(encrypted, "layer", text, move, otherwise=Mark.INFO)
    for disk in drive.disks:
        text = f"{disk.name}: {disk.model or 'no model given'}, {disk.transport}, {size_text(disk.nbytes)}"
        if disk.numa_node is not None:
            text += f", on NUMA node {disk.numa_node}"
        why = disk.weakness
        section.warn_if(bool(why), "disk", text + (f"; {why}" if why else ""), LOCAL)
    if drive.device:
        _check_queue(section, drive, drive.queue)
        text = f"{format_bytes(block_bytes)} by default: the largest request, up to 1 MiB"
        section.add("block_size", Mark.INFO, text)


def _check_queue(section: Section, drive: Drive, queue: Queue) -> None:
    text = f"requests of at most {kib_text(queue.max_sectors_kb)} (the device: {kib_text(queue.max_hw_sectors_kb)})"
    text += f" in {count_text(queue.max_segments)} segments, {count_text(queue.nr_requests)} in flight"
    small = (queue.max_sectors_kb or 512) < min(512, queue.max_hw_sectors_kb or 512)
    top = f"/sys/block/{drive.disks[0].name if len(drive.disks) == 1 and not drive.layers else drive.device}/queue"
    move = f"echo {min(queue.max_hw_sectors_kb or 512, 4096)} > {top}/max_sectors_kb (as root)"
    section.warn_if(small, "requests", text, move, otherwise=Mark.INFO)
    text = f"scheduler {queue.scheduler or 'unknown'}, write cache {queue.write_cache or 'unknown'}, "
    text += {True: "poll queues", False: "no poll queues", None: "poll queues unknown"}[queue.io_poll]
    text += f", blocks of {count_text(queue.logical_block_size)} B (physical {count_text(queue.physical_block_size)} B)"
    move = f"echo none > {top}/scheduler (as root): bfq shares fairly at the cost of bandwidth"
    section.warn_if(queue.scheduler == "bfq", "queue", text, move, otherwise=Mark.INFO)


@dataclass(frozen=True)
class Trial:
    """Result of the trial. alignment: (of memory, of offset and length) in bytes, as the kernel reports it."""

    backend: str
    direct: bool
    alignment: tuple[int, int] | None
    identical: bool
    notes: list[str]


def check_trial(section: Section, path: Path, path_section: Section) -> None:
    """Write random bytes through the engine into a run folder, read them back, compare them bit for bit."""
    section.facts = {"trial_bytes": TRIAL_BYTES}
    section.facts |= dict.fromkeys(["backend", "direct", "alignment", "identical", "notes"])
    if not path_section.facts["usable"]:
        section.add("write_and_read", Mark.INFO, "not tried: the path can't be used")
        return
    try:
        trial = _try_engine(path)
    except (OSError, MemoryError) as error:
        move = "do what the line says; dmesg reports a failing drive"
        section.add("write_and_read", Mark.FAIL, f"failed: {error}", move)
        return
    section.facts |= asdict(trial)
    _judge(section, trial)


def _try_engine(path: Path) -> Trial:
    import torch

    from infinity.aio import File, IoEngine, PinnedPool, Priority, Request, direct_alignment
    from infinity.store.run_folder import RunFolder

    pool = PinnedPool(2 * TRIAL_BYTES)
    with signals_held():
        folder = RunFolder(path)
    try:
        engine = IoEngine(pool)
        file = File(folder.path / "trial", create=True)
        alignment = direct_alignment(file.path)
        file.reserve(TRIAL_BYTES)
        with pool.lease(TRIAL_BYTES) as source, pool.lease(TRIAL_BYTES) as target:
            source.view(torch.uint8).copy_(torch.frombuffer(bytearray(os.urandom(TRIAL_BYTES)), dtype=torch.uint8))
            for operation, lease in (("write", source), ("read", target)):
                engine.wait(engine.start([Request(operation, file, 0, lease, 0, TRIAL_BYTES, Priority.DEMAND)]))
            identical = torch.equal(source.view(torch.uint8), target.view(torch.uint8))
        file.close()
        engine.close()
    finally:
        with signals_held():
            folder.close()
    notes = [*pool.notes, *engine.notes, *file.notes]
    return Trial(engine.backend, file.direct, alignment, identical, notes)


def _judge(section: Section, trial: Trial) -> None:
    text = f"{format_bytes(TRIAL_BYTES)} of random bytes through {trial.backend}"
    if trial.identical:
        section.add("write_and_read", Mark.OK, f"{text}: read back unchanged, bit for bit")
    else:
        move = "don't train here: test the machine's memory and the drive (smartctl -a), and report it"
        section.add("write_and_read", Mark.FAIL, f"{text}: read back changed", move)
    if not trial.direct:
        text = "refused: transfers go through the page cache, which costs memory and CPU"
        section.add("direct_io", Mark.WARN, text, LOCAL)
    elif trial.alignment is None:
        section.add("direct_io", Mark.OK, "works; the kernel does not report the alignment it needs")
    else:
        memory, offset = trial.alignment
        fits = all(nbytes and PAGE_BYTES % nbytes == 0 for nbytes in trial.alignment)
        text = f"works; alignment of memory {memory} B, of offset and length {offset} B"
        move = f"use a drive that takes {PAGE_BYTES} B, as every transfer is aligned to that"
        section.add("direct_io", Mark.OK if fits else Mark.FAIL, text, "" if fits else move)
    for note in trial.notes:
        section.add("note", Mark.INFO, note)
