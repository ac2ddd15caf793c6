"""Ranks as processes: rank 0 starts the others, leads them and ends with them.

Generated from notebooks/10b_ranks.ipynb: edit there.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

import torch
import torch.distributed

from minisgl.config.engine import SchedulerConfig, TPInfo, choose_device
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import refuse
from minisgl.engine.heap import frozen_heap
from minisgl.parallel.comm import Comm
from minisgl.parallel.nccl import NcclComm, leave_group
from minisgl.parallel.sockets import START_SECONDS, CommError, SocketComm, socket_pairs
from minisgl.runtime.broadcast import BroadcastChannel
from minisgl.runtime.supervisor import LEAVE, PeerFailed, Supervisor, Worker, WorkerContext
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.messages import Reply


class Place(NamedTuple):
    """Position of a rank in its group."""

    rank: int
    size: int
    device: str
    timeout: float  # of an operation on tensors, in seconds
    links: list[socket.socket]  # to rank 0, or from it to all others


def join(place: Place) -> SocketComm:
    """Join the group and return its communicator: with NCCL if `device` is a GPU."""
    rank, size, device, timeout, links = place
    if torch.device(device).type == "cuda":
        return NcclComm(links, rank, size, torch.device(device), timeout)
    return SocketComm(links, rank, size, timeout)


def rank_main(
    place: Place, entry: Callable[..., Any], args: tuple[Any, ...], context: WorkerContext
) -> Any:
    """Run a rank process: join the group, call `entry(comm, *args)` and return its result."""
    # A rank has nothing to clean up, and no Python handler runs in a collective call.
    signal.signal(LEAVE, signal.SIG_DFL)
    torch.set_num_threads(1)
    context.ready()
    try:
        comm = join(place)
        result = entry(comm, *args)
    except (CommError, torch.distributed.DistError) as error:  # most likely another rank's failure
        raise PeerFailed(str(error)) from error
    comm.close()
    return result


class RankProcesses(Supervisor):
    """Processes for the ranks in `ranks` of a group of `size`, which all call `entry(comm, *args)`.

    `entry` must be importable. After an error the processes are ended at once, because no rank will
    reach another collective call.
    """

    def __init__(
        self,
        entry: Callable[..., Any],
        args: tuple[Any, ...] = (),
        *,
        ranks: range,
        size: int,
        devices: Sequence[str] = (),
        timeout: float = 60.0,
        method: str = "spawn",
    ) -> None:
        self.links, workers = socket_pairs(size), []
        for rank in ranks:
            device = devices[rank] if devices else "cpu"
            place = Place(rank, size, device, timeout, self.links[rank])
            main = f"{rank_main.__module__}:rank_main"
            workers.append(Worker(f"rank {rank}", main, (place, entry, args)))
        super().__init__(workers, start_seconds=START_SECONDS, method=method)
        self.given = [link for rank in ranks for link in self.links[rank]]

    def __enter__(self) -> Self:
        super().__enter__()
        for link in self.given:  # each process has its own copies
            link.close()
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self.grace = 0.0
        self.stop()


def config_of_rank(config: SchedulerConfig, rank: int, size: int) -> SchedulerConfig:
    """Return the config of another rank of the group."""
    return replace(config, tp=TPInfo(rank=rank, size=size))


def tp_worker(comm: Comm, config: SchedulerConfig) -> None:
    """Run a rank other than 0: build engine and scheduler, then replay rank 0's messages."""
    config = config_of_rank(config, comm.rank, comm.size)
    channel = BroadcastChannel(None, comm)
    scheduler = build_scheduler(config, channel, comm)
    try:
        with frozen_heap():
            scheduler.run()
    finally:
        scheduler.engine.shutdown()


def devices_of(config: SchedulerConfig) -> list[str]:
    """Choose a device for each rank; raise ValueError if model or GPUs allow fewer ranks."""
    size = config.tp.size
    model = ModelConfig.from_path(resolve_model_path(config.model_path))
    model.check_tp(size, config.expert_parallel)  # before each process raises the same error
    devices = [choose_device(config.device, rank) for rank in range(size)]
    if size > 1 and devices[0] != "cpu" and len(set(devices)) == 1:
        raise refuse("device", f"cuda, which is a GPU for each of {size} ranks", config.device)
    if devices[0] != "cpu" and torch.cuda.device_count() < size:
        here = torch.cuda.device_count()
        raise refuse("tp", f"at most the number of GPUs, {here} here", size)
    return devices


class Ranks:
    """Rank 0's side of a group: this process is rank 0, the others are its children.

    Pass `comm` and `channel(outer)` to `build_scheduler` and run the scheduler until it receives an
    `ExitMsg`, which also reaches the others. Shut its engine down, then call `close()`.
    Raises `ValueError` for an impossible split, `WorkerFailed` if another rank fails.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        devices, size = devices_of(config), config.tp.size
        if torch.distributed.is_initialized():  # a process is in one group at a time
            must = "1 while another engine with ranks is open in this process: shut it down first"
            raise refuse("tp", must, size)
        timeout = config.distributed_timeout
        self.processes = RankProcesses(
            tp_worker, (config,),
            ranks=range(1, size), size=size, devices=devices, timeout=timeout,
        )  # fmt: skip
        self.lost = threading.Event()  # a rank is lost: the current step's result is garbage
        self.stop_waiting: Callable[[], None] = lambda: None
        self.processes.__enter__()
        try:
            while self.processes.starting():
                self.processes.listen(0.2)
            self.comm = self._meet(Place(0, size, devices[0], timeout, self.processes.links[0]))
        except BaseException:
            self.give_up()
            raise
        self.comm.on_failure = self.explain
        if isinstance(self.comm, NcclComm):
            self.stop_waiting = self.comm.abort
            for process in self.processes.processes.values():
                threading.Thread(target=self.watch, args=(process,), daemon=True).start()

    def _meet(self, place: Place) -> SocketComm:
        """Join the group as rank 0; raise WorkerFailed soon if another rank cannot join it."""
        try:
            return join(place)
        except RuntimeError:  # a CommError, or from NCCL: a rank did not come
            self.explain()
            raise

    def explain(self) -> None:
        """Raise WorkerFailed if a rank's failure explains a failed operation of rank 0."""
        self.processes.listen(1.0)
        self.processes.check()

    def watch(self, process: BaseProcess) -> None:
        """Wait for the end of another rank's process; free our GPU if it was not orderly."""
        try:  # leaves the exit status for `multiprocessing`
            ending = os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)
            status = ending and ending.si_status
        except ChildProcessError:  # another thread has read it
            status = process.exitcode
        if status != 0:
            self.lost.set()
            self.stop_waiting()

    def channel(self, outer: Channel) -> BroadcastChannel:
        """Return rank 0's end of the channel that all ranks share."""
        return LeadingChannel(outer, self)

    def alive(self) -> bool:
        """Return True, or raise WorkerFailed, so that a waiting loop does not miss a death."""
        self.processes.check()
        return True

    def close(self) -> None:
        """Leave with the other ranks after an `ExitMsg`; terminate one that does not."""
        try:
            self.comm.close()
        finally:
            self.processes.stop()

    def give_up(self, shutdown: Callable[[], None] = lambda: None) -> None:
        """End all ranks at once; `shutdown` is the engine's: NCCL ends after the last graph."""
        self.processes.grace = 0.0
        self.processes.stop()
        for link in self.processes.links[0]:
            link.close()
        self.stop_waiting()
        with suppress(RuntimeError):  # a GPU may be lost with its rank
            shutdown()
        leave_group()  # without the other ranks, which are gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()


class LeadingChannel(BroadcastChannel):
    """Rank 0's end of the channel that all ranks share; silent once a rank is lost."""

    def __init__(self, outer: Channel, ranks: Ranks) -> None:
        super().__init__(outer, ranks.comm)
        self.ranks = ranks

    def send(self, replies: Sequence[Reply]) -> None:
        if self.ranks.lost.is_set():
            self.ranks.explain()
        super().send(replies)
