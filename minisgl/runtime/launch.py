"""Starts the processes of a group, hears from each how it ended, and leaves none behind.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from minisgl.parallel.gloo import CommError, GlooComm, c10d
from minisgl.parallel.nccl import NcclComm

START_SECONDS = 600.0  # for a process to start and import torch on a busy machine


class RankError(RuntimeError):
    """A rank failed; the message holds its own traceback."""


def open_store() -> Any:
    """Where the ranks of a new group find each other: a small server in this process."""
    return c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(store: Any, rank: int, size: int, timeout: float, device: str) -> GlooComm:
    """This rank's communicator: NCCL carries the tensors if `device` is a GPU."""
    store.set(f"here/{rank}", b"")  # processes start at very different speeds: meet first
    store.wait([f"here/{other}" for other in range(size)], timedelta(seconds=START_SECONDS))
    if torch.device(device).type == "cuda":
        return NcclComm(store, rank, size, torch.device(device), timeout)
    return GlooComm(store, rank, size, timeout)


def leave_with_parent() -> None:
    """End this process when its parent ends, even if it is stuck in a collective operation."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave with parent").start()


class Place(NamedTuple):
    """Where a rank process stands."""

    rank: int
    size: int
    device: str
    port: int  # of the store
    timeout: float  # seconds


def rank_main(place: Place, entry: Callable[..., Any], args: tuple, report: Connection) -> None:
    """First code of a rank process: join, call `entry(comm, *args)`, report how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which tells the others
    torch.set_num_threads(1)
    leave_with_parent()
    try:
        store = c10d.TCPStore("127.0.0.1", place.port, is_master=False)
        report.send(("here", None))
        comm = join(store, place.rank, place.size, place.timeout, place.device)
        result = entry(comm, *args)
        comm.close()
        report.send(("done", result))
    except CommError:
        report.send(("lost", traceback.format_exc()))  # most likely another rank's fault
        sys.exit(1)
    except BaseException:
        report.send(("failed", traceback.format_exc()))
        sys.exit(1)


class RankProcesses:
    """Processes for the ranks in `ranks`, of a group of `size`; a context manager.

    On leaving, all are gone: they had `grace` seconds to end by themselves.
    """

    def __init__(
        self, entry: Callable[..., Any], args: tuple = (), *, ranks: range, size: int,
        devices: Sequence[str] | None = None, timeout: float = 60.0, grace: float = 5.0,
        method: str = "spawn",
    ) -> None:  # fmt: skip
        context: Any = multiprocessing.get_context(method)
        self.store, self.grace = open_store(), grace
        self.reports: dict[int, Connection] = {}
        self.processes: dict[int, BaseProcess] = {}
        self.here: set[int] = set()
        self.ended: dict[int, tuple[str, Any]] = {}  # rank to ("done", result) and the like
        for rank in ranks:
            device = devices[rank] if devices else "cpu"
            place = Place(rank, size, device, self.store.port, timeout)
            self.reports[rank], sender = context.Pipe(duplex=False)
            self.processes[rank] = context.Process(
                target=rank_main, args=(place, entry, args, sender), name=f"minisgl rank {rank}",
                daemon=True,
            )  # fmt: skip
            self.processes[rank].start()
            sender.close()  # so that the end of the process ends the pipe

    def listen(self, seconds: float) -> None:
        """Take in reports for at most that long; returns early when something was heard."""
        waiting = {rank: pipe for rank, pipe in self.reports.items() if rank not in self.ended}
        ready = wait(list(waiting.values()), timeout=seconds)
        for rank, pipe in waiting.items():
            if pipe not in ready:
                continue
            try:
                message = pipe.recv()
                if message[0] == "here":
                    self.here.add(rank)
                else:
                    self.ended[rank] = message
            except EOFError:  # no report at all: killed, or crashed below Python
                self.processes[rank].join(1.0)
                code = self.processes[rank].exitcode
                how = f"was killed by signal {-code}" if code and code < 0 else f"ended with {code}"
                if rank not in self.here:
                    how += (
                        " before it began; scripts start ranks under `if __name__ == '__main__':`"
                    )
                self.ended[rank] = ("failed", f"rank {rank} {how}")

    def check(self) -> None:
        """RankError if a rank has failed; says which one was first at fault, with its traceback."""
        self.listen(0.0)
        if all(kind == "done" for kind, _ in self.ended.values()):
            return
        deadline = time.monotonic() + 3.0  # others lose their connection first and report it first
        while time.monotonic() < deadline and not self.failures("failed"):
            if len(self.ended) == len(self.processes):
                break
            self.listen(0.1)
        rank, text = (self.failures("failed") or self.failures("lost"))[0]
        raise RankError(f"rank {rank} failed:\n{text}")

    def gather(self) -> None:
        """Wait until every process has started; RankError if one fails on the way."""
        deadline = time.monotonic() + START_SECONDS
        while len(self.here) < len(self.processes):
            self.listen(0.2)
            self.check()
            if time.monotonic() > deadline:
                absent = sorted(self.processes.keys() - self.here)
                raise RankError(f"ranks {absent} did not start within {START_SECONDS:g} s")

    def failures(self, kind: str) -> list[tuple[int, str]]:
        """Ranks that ended in this way, and what they said."""
        return [(rank, text) for rank, (how, text) in self.ended.items() if how == kind]

    def results(self, timeout: float) -> list[Any]:
        """What the ranks' entries returned, in order; RankError as soon as one fails."""
        deadline = time.monotonic() + timeout
        while len(self.ended) < len(self.processes):
            self.listen(0.2)
            self.check()
            if time.monotonic() > deadline:
                waiting = sorted(self.processes.keys() - self.ended.keys())
                raise RankError(f"ranks {waiting} gave no result within {timeout:g} s")
        self.check()
        return [self.ended[rank][1] for rank in sorted(self.processes)]

    def stop(self) -> None:
        """Wait a little, then insist; afterwards no process of the group is alive."""
        deadline = time.monotonic() + self.grace
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for insist in ("terminate", "kill"):
            alive = [process for process in self.processes.values() if process.is_alive()]
            for process in alive:
                getattr(process, insist)()
            for process in alive:
                process.join(2.0)
        for connection in self.reports.values():
            connection.close()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self.grace = 0.0  # after an error nobody will come to a meeting any more
        self.stop()


def run_ranks(
    entry: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0, method: str = "spawn"
) -> list[Any]:
    """Call `entry(comm, *args)` in `size` new CPU processes; their results in order.

    `entry` must be importable: the processes begin empty. `timeout` in seconds counts from when
    all have started. RankError carries a child's traceback.
    """
    with RankProcesses(
        entry, args, ranks=range(size), size=size, timeout=timeout, method=method
    ) as group:
        group.gather()
        return group.results(timeout)
