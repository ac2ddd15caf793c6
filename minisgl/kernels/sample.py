"""Triton kernels that sample tokens from logits in one pass, and apply top-k and top-p.

Generated from notebooks/06c_sampling_kernel.ipynb: edit there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernels.device import device_limits


# mypy: allow-untyped-defs, allow-incomplete-defs
@triton.jit
def hash_bits(tokens, key0, key1):
    """Return 31 random bits for each token, int32, equal to the sampler's `token_bits`."""
    x = (tokens ^ key0).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ key1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def hash_noise(bits):
    """Return standard Gumbel noise of random bits, float32, always finite."""
    u = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    u = tl.minimum(u, 0.99999994)  # the largest float32 below 1
    rest = 1.0 - u
    # -log1p(-u): the quotient repairs the digits of a small u that 1 - u has lost.
    lost = tl.where(rest == 1.0, -1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, u, tl.log(rest) * (u / lost))
    return -tl.log(exponential)


LOWEST = tl.constexpr(-(2**31))  # sorts below every number


@triton.jit
def float_key(x):
    """Return integers ordered like the float32 numbers x; -0 equals 0, and NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def key_float(key):
    """Return the float32 number of a key; the inverse of `float_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row_ptr, ids, end):
    """Load the logits of these ids as float32; -inf from `end` on."""
    return tl.load(row_ptr + ids, mask=ids < end, other=float("-inf")).to(tl.float32)


@triton.jit
def best_greedy(row_ptr, begin, end, BLOCK: tl.constexpr):
    """Return key and id of the largest logit in [begin, end); ties take the smallest id."""
    best = tl.full([BLOCK], LOWEST, tl.int32)
    best_id = tl.full([BLOCK], 0, tl.int32) + begin
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        key = tl.where(ids < end, float_key(load_logits(row_ptr, ids, end)), LOWEST)
        better = key > best  # a lane reads its ids in order, so the first of equals stays
        best = tl.where(better, key, best)
        best_id = tl.where(better, ids, best_id)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, end), 0)


@triton.jit
def may_win(x, bits, best, temperature):
    """Return False where noise of these bits cannot lift logits x to `best`; no logarithm."""
    u = ((bits >> 8) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0  # cut off: never too large
    short = x - (best - tl.abs(best) * 2.4e-7)  # a sum may have been rounded up
    short = tl.where(short < 0, short, 0.0)  # NaN may win
    return u <= tl.exp2(short * (1.4426950408889634 / temperature)) * 1.001


@triton.jit
def best_noisy(
    row_ptr, begin, end, key0, key1, temperature, threshold, last_id,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return key and id of the largest logit + temperature * noise in [begin, end)."""
    best = tl.full([], LOWEST, tl.int32)
    best_id = begin
    ahead = load_logits(row_ptr, begin + tl.arange(0, BLOCK), end)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x, allowed = ahead, ids < end
        ahead = load_logits(row_ptr, ids + BLOCK, end)  # prefetch the next block
        if FILTERED:
            x = tl.where((x != x) & (threshold > LOWEST), float("inf"), x)
            key = float_key(x)
            allowed &= (key > threshold) | ((key == threshold) & (ids <= last_id))
        bits = hash_bits(ids, key0, key1)
        hopeful = allowed & may_win(x, bits, key_float(best), temperature)
        if tl.max(hopeful.to(tl.int32), 0) > 0:
            score = tl.where(allowed, float_key(x + temperature * hash_noise(bits)), LOWEST)
            top = tl.max(score, 0)
            if top > best:
                best = top
                best_id = tl.min(tl.where(score == top, ids, end), 0)
    return best, best_id


@triton.jit
def slice_kernel(
    logits_ptr, keys_ptr, temperature_ptr, threshold_ptr, last_ptr, best_ptr, best_id_ptr,
    row_stride, key_stride, vocab, width,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the best key of a slice of `width` tokens and its id; one thread block per slice."""
    row, part = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    begin = part * width
    end = tl.minimum(begin + width, vocab)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        key0, key1 = tl.load(keys_ptr + row), tl.load(keys_ptr + key_stride + row)
        threshold, last_id = LOWEST, vocab
        if FILTERED:
            threshold, last_id = tl.load(threshold_ptr + row), tl.load(last_ptr + row)
        best, best_id = best_noisy(
            row_ptr, begin, end, key0, key1, temperature, threshold, last_id, FILTERED, BLOCK
        )
    else:
        best, best_id = best_greedy(row_ptr, begin, end, BLOCK)
    place = row * tl.num_programs(1) + part
    tl.store(best_ptr + place, best)
    tl.store(best_id_ptr + place, best_id)


@triton.jit
def merge_kernel(best_ptr, best_id_ptr, out_ptr, parts, PARTS: tl.constexpr):
    """Store the id of a row's best slice, ties to the smallest; one thread block per row."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    best = tl.load(best_ptr + row * parts + part, mask=part < parts, other=LOWEST)
    ids = tl.load(best_id_ptr + row * parts + part, mask=part < parts, other=0x7FFFFFFF)
    top = tl.max(best, 0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, ids, 0x7FFFFFFF), 0).to(tl.int64))


SLICE_BLOCK = 2048  # tokens that a thread block loads at once


def target_programs(device: torch.device) -> int:
    """Return the thread blocks of a launch: four per SM."""
    return 4 * device_limits(device).sms


def slices(rows: int, vocab: int, programs: int) -> tuple[int, int, int]:
    """Return how to cut `rows` rows: slices per row, tokens per slice, tokens per block."""
    block = min(SLICE_BLOCK, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, block)
    # Rounded down: a few thread blocks too many for one wave would take as long as two waves.
    parts = min(blocks, max(1, programs // rows))
    width = triton.cdiv(blocks, parts) * block
    return triton.cdiv(vocab, width), width, block


@triton.jit
def load_keys(row_ptr, ids, vocab, SHIFT: tl.constexpr):
    """Load logits and their keys, shifted right by the dtype's SHIFT unset bits; NaN is +inf."""
    x = load_logits(row_ptr, ids, vocab)
    x = tl.where(x != x, float("inf"), x)
    return x, tl.where(ids < vocab, float_key(x), LOWEST) >> SHIFT


@triton.jit
def group_maxima(row_ptr, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest key of each group of tokens whose ids are equal modulo BLOCK."""
    best = tl.full([BLOCK], LOWEST, tl.int32) >> SHIFT
    for start in range(0, vocab, BLOCK):
        _, key = load_keys(row_ptr, start + tl.arange(0, BLOCK), vocab, SHIFT)
        best = tl.maximum(best, key)
    return best


@triton.jit
def count_from(row_ptr, vocab, floor, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the keys of the row that are at least `floor`."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        _, key = load_keys(row_ptr, start + tl.arange(0, BLOCK), vocab, SHIFT)
        count += (key >= floor).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def kth_key(row_ptr, vocab, k, maxima, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the k-th largest key of the row: the largest that at least k keys reach."""
    low = tl.full([], LOWEST, tl.int32) >> SHIFT
    high = tl.max(maxima, 0)
    while low < high:  # among the groups: without reading the row
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        if tl.sum((maxima >= middle).to(tl.int32), 0) >= k:
            low = middle
        else:
            high = middle - 1
    high = tl.max(maxima, 0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        if count_from(row_ptr, vocab, middle, SHIFT, BLOCK) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def shifted_float(key, SHIFT: tl.constexpr):
    """Return the number of a key that lost SHIFT bits: zeros, or ones below a negative number."""
    return key_float(tl.where(key < 0, (key << SHIFT) | ((1 << SHIFT) - 1), key << SHIFT))


@triton.jit
def softmax_weight(x, largest, temperature):
    """Return exp((x - largest) / temperature) in units of 2**-40, int64, for exact sums."""
    share = tl.exp(x / temperature - largest / temperature)
    return (tl.where(share != share, 0.0, share) * 1099511627776.0).to(tl.int64)


@triton.jit
def mass_above(
    row_ptr, vocab, floor, largest, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the weight of the keys above `floor` in each group, int64 [BLOCK]."""
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        x, key = load_keys(row_ptr, start + tl.arange(0, BLOCK), vocab, SHIFT)
        if tl.max(key, 0) > floor:
            mass += tl.where(key > floor, softmax_weight(x, largest, temperature), 0)
    return mass


@triton.jit
def bound_of_groups(maxima, mass, limit, low, high):
    """Find the smallest key in [low, high] above which groups weigh less than `limit`."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        if tl.sum(tl.where(maxima > middle, mass, 0), 0).to(tl.float64) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def nucleus_key(
    row_ptr, vocab, floor, maxima, mass, limit, largest, temperature,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the smallest key, at least `floor`, above which all keys weigh less than `limit`."""
    alone = softmax_weight(shifted_float(maxima, SHIFT), largest, temperature)
    alone = tl.where(maxima > floor, alone, 0)
    low = bound_of_groups(maxima, alone, limit, floor, tl.max(maxima, 0))
    high = bound_of_groups(maxima, mass, limit, low, tl.max(maxima, 0))
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        heavier = mass_above(row_ptr, vocab, middle, largest, temperature, SHIFT, BLOCK)
        if tl.sum(heavier, 0).to(tl.float64) < limit:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def ties_within(above, each, limit, room):
    """Count the ties that top-p keeps: of `room`, each of weight `each`, starting below `limit`."""
    low, high = tl.full([], 0, tl.int32), room
    while low < high:
        middle = (low + high) // 2
        if (above + middle.to(tl.int64) * each).to(tl.float64) < limit:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low, 1)  # one candidate always stays


@triton.jit
def nth_tie(row_ptr, vocab, wanted, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Find the n-th token, from 1, whose key is `wanted`; `vocab` if there are fewer."""
    seen, last = tl.full([], 0, tl.int32), vocab
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _, key = load_keys(row_ptr, ids, vocab, SHIFT)
        hit = (key == wanted).to(tl.int32)
        count = tl.sum(hit, 0)
        if (seen < n) & (seen + count >= n):
            rank = seen + tl.cumsum(hit, 0)
            last = tl.min(tl.where((hit > 0) & (rank == n), ids, vocab), 0)
        seen += count
    return last


@triton.jit
def filter_row(row_ptr, vocab, temperature, top_k, top_p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the smallest key that top-k and top-p keep, and the last id of that key."""
    maxima = group_maxima(row_ptr, vocab, SHIFT, BLOCK)
    largest = shifted_float(tl.max(maxima, 0), SHIFT)
    floor = tl.full([], LOWEST, tl.int32) >> SHIFT
    each, room = tl.full([], 0, tl.int64), vocab
    if (top_k > 0) & (top_k < vocab):
        floor = kth_key(row_ptr, vocab, top_k, maxima, SHIFT, BLOCK)
        room = top_k - count_from(row_ptr, vocab, floor + 1, SHIFT, BLOCK)
        each = softmax_weight(shifted_float(floor, SHIFT), largest, temperature)
    mass = mass_above(row_ptr, vocab, floor, largest, temperature, SHIFT, BLOCK)
    above = tl.sum(mass, 0)
    limit = (above + room.to(tl.int64) * each).to(tl.float64) * top_p
    if above.to(tl.float64) >= limit:  # top-p cuts above the k-th
        floor = nucleus_key(
            row_ptr, vocab, floor, maxima, mass, limit, largest, temperature, SHIFT, BLOCK
        )
        above = tl.sum(mass_above(row_ptr, vocab, floor, largest, temperature, SHIFT, BLOCK), 0)
        each, room = softmax_weight(shifted_float(floor, SHIFT), largest, temperature), vocab
    n = ties_within(above, each, limit, room)
    last_id = nth_tie(row_ptr, vocab, floor, n, SHIFT, BLOCK)
    return float_key(shifted_float(floor, SHIFT)), last_id


@triton.jit
def filter_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, threshold_ptr, last_ptr,
    row_stride, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Filter a row by top-k and top-p; one thread block per row, which may keep everything."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    threshold, last_id = tl.full([], LOWEST, tl.int32), vocab
    if (temperature > 0) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)):
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride
        threshold, last_id = filter_row(row_ptr, vocab, temperature, top_k, top_p, SHIFT, BLOCK)
    tl.store(threshold_ptr + row, threshold)
    tl.store(last_ptr + row, last_id)


FILTER_BLOCK = 8192  # groups, and tokens that a filter's thread block loads at once
UNSET_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # zero in every float32


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return threshold and last id that top-k and top-p keep of logits [bs, vocab]: int32 [bs].

    A token stays if `float_key` of its logit is above the threshold, or equal to it with an id
    up to the last. temperature float32 [bs], 0 for no filter; top_k int32 [bs], 0 for off; top_p
    float64 [bs], 1 for off. The logits of a row are contiguous.
    """
    rows, vocab = logits.shape
    threshold, last_id = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    filter_kernel[(rows,)](
        logits, temperature, top_k, top_p, threshold, last_id, logits.stride(0), vocab,
        SHIFT=UNSET_BITS[logits.dtype], BLOCK=min(FILTER_BLOCK, triton.next_power_of_2(vocab)),
        num_warps=16,
    )  # fmt: skip
    return threshold, last_id


def sample_logits(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    out: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    """Sample a token for each row of logits [bs, vocab], int64 [bs], into `out` if it is given.

    keys int32 [2, bs]; temperature float32 [bs], 0 for a greedy row. Filters: as in
    `filter_logits`, both or none. Rows may have any stride. Samples equal `sample_tokens`'.
    """
    rows = len(logits)
    if logits.dtype not in UNSET_BITS:
        raise ValueError(f"logits: must be bfloat16, float16 or float32, got {logits.dtype}")
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows > 0:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        filters = (temperature, temperature)  # not read
        if top_k is not None and top_p is not None:
            filters = filter_logits(logits, temperature, top_k, top_p)
        launch(logits, keys, temperature, filters, top_k is not None, out)
    return out


def launch(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor],
    filtered: bool,
    out: Tensor,
) -> None:
    """Launch both sampling stages: the best of each slice, then the best slice of each row."""
    rows, vocab = logits.shape
    parts, width, block = slices(rows, vocab, target_programs(logits.device))
    best, best_id = torch.empty(2, rows, parts, dtype=torch.int32, device=logits.device)
    slice_kernel[(rows, parts)](
        logits, keys, temperature, *filters, best, best_id,
        logits.stride(0), keys.stride(0), vocab, width, FILTERED=filtered, BLOCK=block,
    )  # fmt: skip
    merge_kernel[(rows,)](
        best, best_id, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
