"""A pass that fails on one rank soon fails on all, with the same error; one that fails on all leaves them in step."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import durable_training as training
import pytest
import torch.distributed as dist

import infinity
from infinity.ranks import links, peers
from infinity.ranks.links import PeerLink
from infinity.ranks.peers import Peers


def standing() -> list[str]:
    return ["step 0.0"]


SCRIPT = Path(training.__file__).with_name("failing_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize("passes", ["forward-forward", "forward-backward", "backward-backward", "step-step"])
def test_a_transfer_that_fails_on_one_rank_ends_the_pass_on_both(
    passes: str, forked_ranks: Any, nvme_path: Path
) -> None:
    """In a forward, a backward or a step, with updates in the forward, the backward or the step."""
    output = forked_ranks(SCRIPT, "transfers", str(nvme_path), passes, timeout_seconds=100).stdout
    assert output.count("no read today") == 2, output


def test_an_error_that_comes_on_all_ranks_leaves_them_together(forked_ranks: Any, nvme_path: Path) -> None:
    output = forked_ranks(SCRIPT, "everywhere", str(nvme_path), timeout_seconds=100).stdout
    assert output.count("not parted") == 2, output


def test_an_error_on_all_ranks_parts_them_where_one_has_something_gathered(forked_ranks: Any, nvme_path: Path) -> None:
    output = forked_ranks(SCRIPT, "gathered", str(nvme_path), timeout_seconds=100).stdout
    assert output.count("parted") == 2, output


@pytest.mark.parametrize("scene", ["apart", "reads_alone"])
def test_ranks_that_go_on_in_different_passes_are_told_so(scene: str, forked_ranks: Any, nvme_path: Path) -> None:
    output = forked_ranks(SCRIPT, scene, str(nvme_path), timeout_seconds=100).stdout
    assert output.count("told") == 2, output


def test_ranks_are_told_that_their_engine_is_closed(forked_ranks: Any, nvme_path: Path) -> None:
    output = forked_ranks(SCRIPT, "closed", str(nvme_path), timeout_seconds=100).stdout
    assert output.count("told") == 2, output


@pytest.mark.parametrize("close", [("before", "none"), ("within", "none"), ("within", "step")], ids="-".join)
def test_a_close_needs_no_rank_that_has_closed(close: tuple[str, str], forked_ranks: Any, nvme_path: Path) -> None:
    output = forked_ranks(SCRIPT, "served_no_more", str(nvme_path), *close, timeout_seconds=100).stdout
    assert output.splitlines().count("closed") == 2, output  # torch may say of a connection that it was closed


@pytest.fixture
def pair() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        yield here, there


def test_a_link_is_cut_at_both_ends_and_nothing_else_that_has_its_number(pair: Any) -> None:
    here, there = pair
    found = {each.here: each for each in links._connections()}
    link = found[here.getsockname()]
    assert (link.descriptor, link.there) == (here.fileno(), there.getsockname())
    PeerLink(here.fileno(), link.there, link.here).cut()
    there.sendall(b"1")
    assert here.recv(2) == b"1"
    link.cut()
    assert here.recv(1) == there.recv(1) == b""


class Aborting:
    """A process group whose operations can be aborted, as NCCL's."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.aborted = threading.Event()

    def get_group_store(self) -> dist.Store:
        return self.store

    def _get_sequence_number_for_group(self) -> int:
        return 7

    def abort(self) -> None:
        self.aborted.set()


def wait_for_the_abort(ours: Peers, group: Any, cause: peers._Report) -> None:
    with ours.in_pass("a forward", standing):
        group.store.set(f"{ours._name}/cause", json.dumps(cause))
        assert group.aborted.wait(20)


def test_operations_on_a_gpu_are_aborted_by_a_thread_that_hears_of_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end as if they had been done; so does the pass, and it must not count."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(peers, "find_links", lambda store: [])
    monkeypatch.setattr(peers, "_can_abort", lambda group: True)
    monkeypatch.setattr(peers, "_LOOK_SECONDS", 0.01)
    group: Any = Aborting(dist.HashStore())
    ours = Peers([group], range(2))
    cause = peers._Report(1, "StoreError", "the drive is full", [3], [])
    with pytest.raises(infinity.StoreError, match="rank 1: the drive is full"):
        wait_for_the_abort(ours, group, cause)
    with (
        pytest.raises(infinity.InfinityError, match="the ranks have parted, because a pass failed on rank 1"),
        ours.in_pass("a forward", standing),
    ):
        pass
    ours.close()


def other_rank_enters(ours: Peers, store: dist.Store, number: int, name: str) -> None:
    store.set(f"{ours._name}/pass {number % peers._NAMES_KEPT}/1", f"{number} {name}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Of two ranks, of which this process is the first."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(peers, "find_links", lambda store: [])
    monkeypatch.setattr(peers, "_can_abort", lambda group: True)
    monkeypatch.setattr(peers, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(peers, "GRACE_SECONDS", 0.1)
    return dist.HashStore()


def wait_while_another_is_in(ours: Peers, group: Any, name: str) -> None:
    with ours.in_pass("a forward", standing):
        other_rank_enters(ours, group.store, 1, name)
        assert group.aborted.wait(20)


@pytest.mark.parametrize("name", ["a forward of step 0.0", "a backward of step 0.0", "a forward of step 1.0", None])
def test_a_pass_counts_only_if_the_others_are_in_the_same(store: dist.Store, name: str | None) -> None:
    ours = Peers([Aborting(store)], range(2))  # type: ignore[list-item]
    for number in range(1, 10):
        other_rank_enters(ours, store, number, "a forward of step 0.0")
        with ours.in_pass("a forward", standing):
            pass
    if name is not None:
        other_rank_enters(ours, store, 10, name)
    if name in (None, "a forward of step 0.0"):  # it has not come yet, or is here
        with ours.in_pass("a forward", standing):
            pass
        assert not ours.parted
    else:
        refused = pytest.raises(infinity.InfinityError, match=rf"rank 0 in a forward of step 0\.0, rank 1 in {name}")
        with refused, ours.in_pass("a forward", standing):
            pass
        assert ours.parted
    ours.close()


def test_a_pass_that_waits_for_ranks_in_another_one_is_ended(store: dist.Store) -> None:
    group: Any = Aborting(store)
    ours = Peers([group], range(2))
    with pytest.raises(
        infinity.InfinityError, match=r"rank 0 in a forward of step 0\.0, rank 1 in a step of step 3\.1"
    ):
        wait_while_another_is_in(ours, group, "a step of step 3.1")
    ours.close()


def test_a_forked_child_runs_no_pass_of_its_rank(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Peers([Aborting(store)], range(2))  # type: ignore[list-item]
    other_rank_enters(ours, store, 1, "a forward of step 0.0")
    with monkeypatch.context() as child:
        child.setattr(peers.os, "getpid", lambda: -1)
        with pytest.raises(infinity.InfinityError, match=r"forked from rank 0"), ours.in_pass("a forward", standing):
            pass
    assert not ours.parted
    with ours.in_pass("a forward", standing):
        pass
    ours.close()


def test_alone_nothing_is_done(one_rank: None) -> None:
    assert dist.group.WORLD is not None
    ours = Peers([dist.group.WORLD], range(1))
    with pytest.raises(KeyError), ours.in_pass("a forward", standing):
        raise KeyError
    with ours.in_pass("a forward", standing):
        pass
    assert not ours.parted
    ours.close()
