"""The channel that all ranks share: the same messages in the same order on every rank.

Generated from notebooks/10_tensor_parallel.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.parallel.comm import Comm
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.frames import Codec
from minisgl.scheduler.messages import Msg, Reply

CODEC = Codec(Msg)


class BroadcastChannel:
    """A channel for every rank: rank 0 alone has the outer one and broadcasts its messages.

    `recv` is a collective call: all ranks make it once per turn of their loop, and get the same
    messages in the same order, as a frame: their parameters are not checked again. Replies of the
    other ranks equal rank 0's and are dropped.
    """

    def __init__(self, outer: Channel | None, comm: Comm) -> None:
        if (outer is not None) != (comm.rank == 0):
            raise ValueError(f"outer: rank 0 alone has a channel, got {outer!r} on {comm.rank}")
        self.outer, self.comm = outer, comm

    def recv(self, block: bool) -> list[Msg]:
        mine = self.outer.recv(block) if self.outer is not None else []
        frame = self.comm.broadcast_object(CODEC.encode(mine), kind=bytes)
        return mine if self.outer is not None else CODEC.decode(frame)

    def send(self, replies: Sequence[Reply]) -> None:
        if self.outer is not None:
            self.outer.send(replies)
