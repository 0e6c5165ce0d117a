"""The hosts of a run and their slots: DeepSpeed's hostfile, --include and --exclude. Pure but for reading one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infinity.errors import ConfigError

LOCALHOST = "localhost"

_EXPECTED = "expected a host and its slots, such as `worker-0 slots=8`"
_HOST = re.compile(r"(\w[\w.+-]*@)?\w[\w.-]*")


class Host(NamedTuple):
    name: str
    slots: int
    chosen: tuple[int, ...] = ()
    """Numbers of the chosen slots, in order; empty for all."""

    @property
    def ranks(self) -> int:
        return len(self.chosen) or self.slots


def read_hostfile(path: Path) -> list[Host]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"hostfile {path}: {error.strerror}; {_EXPECTED} on each line of it") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        where = f"hostfile {path}, line {number}"
        name, *settings = line.partition("#")[0].split() or [""]
        if not name:
            continue
        if not _HOST.fullmatch(name):
            raise ConfigError(f"{where}: {name!r} is not a host name; {_EXPECTED}")
        if name in hosts:
            raise ConfigError(f"{where}: {name} is listed twice; name each host once, with all of its slots")
        unknown = [setting for setting in settings if not setting.startswith("slots=")]
        if unknown:
            raise ConfigError(f"{where}: {unknown[0]!r} is unknown; {_EXPECTED}")
        if len(settings) != 1 or not re.fullmatch("slots=0*[1-9][0-9]{0,5}", settings[0], re.ASCII):
            raise ConfigError(f"{where}: {' '.join(settings) or 'no slots'}; {_EXPECTED}, at least one slot")
        hosts[name] = Host(name, int(settings[0].removeprefix("slots=")))
    if not hosts:
        raise ConfigError(f"hostfile {path} has no host; {_EXPECTED} on each line")
    return [*hosts.values()]


def choose(hosts: Sequence[Host], *, include: str | None = None, exclude: str | None = None) -> list[Host]:
    """Return only the slots in `include`, or all but those in `exclude`. `worker-0@worker-1:0,2` means all slots of
    worker-0 and two of worker-1. Raises ConfigError."""
    if include is None and exclude is None:
        return [*hosts]
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    named = _slots_named(hosts, f"{option} {text}", text or "")
    chosen = []
    for host in hosts:
        slots = named.get(host.name, set())
        if exclude is not None:
            slots = {*range(host.slots)} - slots
        if slots:
            chosen.append(host if len(slots) == host.slots else host._replace(chosen=tuple(sorted(slots))))
    if not chosen:
        raise ConfigError(f"{option} {text} leaves no slot of {', '.join(host.name for host in hosts)}")
    return chosen


def _slots_named(hosts: Sequence[Host], where: str, text: str) -> dict[str, set[int]]:
    named: dict[str, set[int]] = {}
    slots_of = {host.name: host.slots for host in hosts}
    parts: list[str] = []
    for part in text.split("@"):  # a host may be named as user@host
        if parts and f"{parts[-1]}@{part.partition(':')[0]}" in slots_of:
            parts[-1] += f"@{part}"
        else:
            parts.append(part)
    for part in parts:
        name, colon, numbers = part.partition(":")
        if name not in slots_of:
            raise ConfigError(f"{where}: there is no host {name!r}; there are {', '.join(slots_of)}")
        if colon and not re.fullmatch("[0-9]{1,6}(,[0-9]{1,6})*", numbers, re.ASCII):
            raise ConfigError(f"{where}: expected a host with slot numbers, such as {name}:0,2, got {part!r}")
        slots = {int(number) for number in numbers.split(",")} if colon else {*range(slots_of[name])}
        if max(slots) >= slots_of[name]:
            raise ConfigError(f"{where}: {name} has the slots 0 to {slots_of[name] - 1}, not {max(slots)}")
        named.setdefault(name, set()).update(slots)
    return named
