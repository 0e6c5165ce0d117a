"""Who owns the process group that infinity makes, and what ends the wait for one."""

from __future__ import annotations

import socket
import threading

import pytest
import torch.distributed as dist

from infinity.errors import InfinityError
from infinity.ranks import process_group
from infinity.ranks.process_group import ensure_process_group


def test_the_last_user_closes_the_group() -> None:
    closers = []
    threads = [threading.Thread(target=lambda: closers.append(ensure_process_group())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for close in closers:
        assert dist.is_initialized()
        close()
    assert not dist.is_initialized()


def test_a_group_of_the_caller_stays() -> None:
    close_ours = ensure_process_group()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    close_theirs = ensure_process_group()
    close_ours()
    close_theirs()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_rank_without_its_launcher_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "_CONNECT_SECONDS_MAX", 0.1)
    with pytest.raises(InfinityError, match=f"launcher of this rank does not answer at 127.0.0.1:{port}"):
        ensure_process_group()
    assert not dist.is_initialized()
