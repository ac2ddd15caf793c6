"""The ends of a recorded step: its integers come from host memory, and its ids go there.

Generated from notebooks/08_engine.ipynb: edit there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit(do_not_specialize=["size"])
def open_kernel(inbox_ptr, turn_ptr, tokens_ptr, memory_ptr, ids_ptr, LETTER, size,
                DEPTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The letter of this turn to the device, and the tokens that its first field names."""
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    letter = inbox_ptr + (tl.load(turn_ptr) % DEPTH) * LETTER + lane
    gather = tl.load(letter, mask=inside, other=0, cache_modifier=".cv")
    tl.store(memory_ptr + lane, gather, mask=inside)
    for field in tl.static_range(1, FIELDS):
        value = tl.load(letter + field * size, mask=inside, other=0, cache_modifier=".cv")
        tl.store(memory_ptr + field * size + lane, value, mask=inside)
    tl.store(ids_ptr + lane, tl.load(tokens_ptr + gather, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["size"])
def close_kernel(drawn_ptr, scatter_ptr, tokens_ptr, ids_ptr, outbox_ptr, turn_ptr, MOST, size,
                 DEPTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The drawn ids to the token pool, to a place on the device and to the host; the next turn."""
    lane = tl.arange(0, BLOCK)
    inside = lane < size
    turn = tl.load(turn_ptr)
    drawn = tl.load(drawn_ptr + lane, mask=inside, other=0)
    tl.store(tokens_ptr + tl.load(scatter_ptr + lane, mask=inside, other=0), drawn, mask=inside)
    tl.store(ids_ptr + lane, drawn, mask=inside)
    tl.store(outbox_ptr + (turn % DEPTH) * MOST + lane, drawn, mask=inside)
    tl.debug_barrier()  # every thread has read the turn before it changes
    tl.store(turn_ptr, turn + 1)


def open_step(inbox: Tensor, turn: Tensor, tokens: Tensor, memory: Tensor, ids: Tensor) -> None:
    """Fill memory [fields, size] from slot `turn` of inbox [depth, fields * most], ids [size]
    from tokens [n] at the places of the first field; all int64, inbox in host memory."""
    depth, letter = inbox.shape
    fields, size = memory.shape
    open_kernel[(1,)](
        inbox, turn, tokens, memory, ids, letter, size, DEPTH=depth, FIELDS=fields,
        BLOCK=triton.next_power_of_2(letter // fields),
    )  # fmt: skip


def close_step(
    drawn: Tensor, scatter: Tensor, tokens: Tensor, ids: Tensor, outbox: Tensor, turn: Tensor
) -> None:
    """Write drawn [size] to tokens [n] at `scatter`, to ids and to slot `turn` of outbox
    [depth, most], which is in host memory; then `turn` goes up by one. All int64."""
    depth, most = outbox.shape
    close_kernel[(1,)](
        drawn, scatter, tokens, ids, outbox, turn, most, len(drawn), DEPTH=depth,
        BLOCK=triton.next_power_of_2(most),
    )  # fmt: skip
