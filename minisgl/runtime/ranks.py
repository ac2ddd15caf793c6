"""The rank protocol: the same messages in the same order, so the same batches, on every rank.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl.config.engine import SchedulerConfig, TPInfo, choose_device
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import refuse
from minisgl.engine.heap import frozen_heap
from minisgl.parallel.comm import Comm
from minisgl.parallel.gloo import GlooComm
from minisgl.runtime.launch import RankProcesses, join
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.messages import Msg, Reply
from minisgl.scheduler.scheduler import Scheduler


class BroadcastChannel:
    """A channel for every rank: rank 0 alone has the outer one and passes on what it receives.

    `recv` is a collective call: all ranks make it once per turn of their loop, and get the same
    messages in the same order. Replies of the other ranks are dropped; they say what rank 0 says.
    """

    def __init__(self, outer: Channel | None, comm: Comm) -> None:
        if (outer is not None) != (comm.rank == 0):
            raise ValueError(f"outer: rank 0 alone has a channel, got {outer!r} on {comm.rank}")
        self.outer, self.comm = outer, comm

    def recv(self, block: bool) -> list[Msg]:
        mine = self.outer.recv(block) if self.outer is not None else []
        messages: list[Msg] = self.comm.broadcast_object(mine)
        return messages

    def send(self, replies: Sequence[Reply]) -> None:
        if self.outer is not None:
            self.outer.send(replies)

    def close(self) -> None:
        if self.outer is not None:
            self.outer.close()


class RanksDiffer(RuntimeError):
    """Ranks that must agree do not; going on would mix up requests or hang."""


def lowest_and_highest(comm: Comm, value: int) -> tuple[int, int]:
    """Over all ranks, with one minimum: the highest is minus the lowest of the negatives."""
    lowest, minus_highest = comm.min_ints([value, -value])
    return lowest, -minus_highest


def require_equal(comm: Comm, what: str, values: Sequence[int]) -> None:
    """RanksDiffer unless all ranks pass the same numbers; `what` names them in the message."""
    size = len(values)
    ends = comm.min_ints([size, -size])
    if ends[0] == -ends[1]:
        ends = comm.min_ints([*values, *(-value for value in values)])
        if all(low == -high for low, high in zip(ends[:size], ends[size:])):
            return
    raise RanksDiffer(f"{what}: rank {comm.rank} has {list(values)}, another rank differs")


def config_of_rank(config: SchedulerConfig, rank: int, size: int) -> SchedulerConfig:
    """The same config for another rank of the group."""
    return replace(config, tp=TPInfo(rank=rank, size=size))


def run_loop(scheduler: Scheduler, overlap: bool) -> None:
    """Until an `ExitMsg`, in the loop that the config asks for; the same one on all ranks."""
    scheduler.overlap = overlap
    scheduler.run()


def tp_worker(comm: Comm, config: SchedulerConfig) -> None:
    """The whole life of a rank other than 0: engine and scheduler, then what rank 0 passes on."""
    config = config_of_rank(config, comm.rank, comm.size)
    scheduler = build_scheduler(config, BroadcastChannel(None, comm), comm)
    try:
        with frozen_heap():
            run_loop(scheduler, scheduler.overlap)
    finally:
        scheduler.engine.shutdown()


class Ranks:
    """Rank 0's side of a group: this process is rank 0, the others are its children.

    Give `comm` and `channel(outer)` to `build_scheduler`, run the scheduler until it has taken an
    `ExitMsg`, which reaches the others on the same way; shut its engine down, then `close()`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        size = config.tp.size
        model = ModelConfig.from_path(resolve_model_path(config.model_path))
        model.check_tp(size)  # before processes start that would all say the same
        devices = [choose_device(config.device, rank) for rank in range(size)]
        if size > 1 and devices[0] != "cpu" and len(set(devices)) == 1:
            raise refuse("device", f"cuda, which is a GPU for each of {size} ranks", config.device)
        if devices[0] != "cpu" and torch.cuda.device_count() < size:
            raise refuse(
                "tp", f"at most the number of GPUs, {torch.cuda.device_count()} here", size
            )
        timeout = config.distributed_timeout
        self.processes = RankProcesses(
            tp_worker, (config,), ranks=range(1, size), size=size, devices=devices, timeout=timeout
        )
        try:
            self.processes.gather()
            self.comm = self.meet(timeout, devices[0])
        except BaseException:
            self.give_up()
            raise
        self.comm.on_failure = self.explain

    def channel(self, outer: Channel) -> BroadcastChannel:
        """Rank 0's end of the channel that all ranks share."""
        return BroadcastChannel(outer, self.comm)

    def explain(self) -> None:
        """Called when rank 0's part of an operation failed: RankError if a child says why."""
        self.processes.listen(1.0)
        self.processes.check()

    def meet(self, timeout: float, device: str) -> GlooComm:
        """Join the group as rank 0; RankError if another rank could not and says why."""
        try:
            return join(self.processes.store, 0, len(self.processes.processes) + 1, timeout, device)
        except RuntimeError:  # CommError, or from below it: the store, a connection that never came
            self.explain()
            raise

    def give_up(self) -> None:
        """End all ranks at once: nobody will come to a meeting any more."""
        self.processes.grace = 0.0
        self.processes.stop()

    def check(self) -> None:
        """RankError if a rank has died."""
        self.processes.check()

    def alive(self) -> bool:
        """True, or RankError: for a loop that waits, which would notice no death otherwise."""
        self.check()
        return True

    def close(self) -> None:
        """Leave with the other ranks, as an `ExitMsg` told them; insist if one does not."""
        try:
            self.comm.close()
        finally:
            self.processes.stop()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()
