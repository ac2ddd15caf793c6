"""Chapter 10: several ranks compute what one computes, build the same batches, and end together."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from minisgl.config.engine import SchedulerConfig
from minisgl.config.model import ModelConfig
from minisgl.core import MAX_GRAMMAR, Batch, SamplingParams
from minisgl.layers.linear import LMHead, VocabParallelEmbedding, head_shard
from minisgl.llm import LLM
from minisgl.models.registry import build_model
from minisgl.models.shards import ShardSpec, layer_shards, model_shards
from minisgl.models.weights import Checkpoint, WeightError, load_weights
from minisgl.parallel import nccl, sockets
from minisgl.parallel.comm import Comm, ParallelContext, SingleRank
from minisgl.parallel.nccl import leave_group
from minisgl.parallel.sockets import CommError, SocketComm, socket_pairs
from minisgl.runtime import ranks as ranks_module
from minisgl.runtime.broadcast import BroadcastChannel
from minisgl.runtime.ranks import Place, RankProcesses, Ranks, config_of_rank, join, tp_worker
from minisgl.runtime.supervisor import Ending, WorkerFailed
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.frames import SentParams, with_seed
from minisgl.scheduler.messages import AbortMsg, ExitMsg, Msg, TokenReply, UserMsg
from minisgl.scheduler.scheduler import Scheduler
from tests import tp_drills
from tests.checkpoints import KINDS, make_checkpoint, make_kind
from tests.forks import Popen
from tests.test_model import reference_logits
from tests.tp_drills import LIMIT, QUICK, quick_ranks, results, run_ranks, run_threads
from tests.turns import in_turns

__all__ = ["quick_ranks"]  # a fixture

SEQUENCES = [[5, 9, 200, 31, 7, 7, 280, 14], [3], list(range(40, 60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, a vocabulary that neither 2 nor 4 divide, an untied head."""
    return make_checkpoint(tmp_path_factory.mktemp("tp"), "qwen3", vocab_size=321)


# ------------------------------------------------------------------- the layers, ranks as threads


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_pitfall_09_kv_heads_fewer_than_ranks(tmp_path: Path, kv_heads: int, size: int) -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, **shape)
    one = tp_drills.logits(SingleRank(), path, SEQUENCES)
    for many in run_threads(tp_drills.logits, size, path, SEQUENCES):
        torch.testing.assert_close(many, one, atol=1e-4, rtol=0)


def test_neighbours_share_a_kv_head() -> None:
    def first_row(comm: Comm) -> int:
        return head_shard("k_proj", 2, 10, comm).start

    assert run_threads(first_row, 4) == [0, 0, 10, 10]
    with pytest.raises(ValueError, match="k_proj: 3 heads cannot be shared evenly by 4 ranks"):
        run_threads(lambda comm: head_shard("k_proj", 3, 10, comm), 4)
    with pytest.raises(ValueError, match="q_proj: 6 heads cannot be shared evenly by 4 ranks"):
        run_threads(lambda comm: head_shard("q_proj", 6, 10, comm), 4)


@pytest.mark.parametrize("vocab_size", [1, 3, 5, 7, 8])
def test_pitfall_09_lm_head_is_gathered_whole(vocab_size: int) -> None:
    """Ranks 2 and 3 hold padding alone when the vocabulary is tiny: it must never be seen."""
    table = torch.randn(vocab_size, 6)
    x = torch.randn(3, 6)
    ids = torch.arange(vocab_size).repeat(2)

    def rank(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        ctx = ParallelContext(comm, torch.float32, "cpu")
        embed, head = VocabParallelEmbedding(vocab_size, 6, ctx), LMHead(vocab_size, 6, ctx)
        (spec,) = layer_shards(embed, "e")
        for layer in (embed, head):
            layer.weight.data.zero_()
            layer.weight.data[spec.target] = table[spec.source]
        return embed(ids), head(x)

    for vectors, logits in run_threads(rank, 4):
        assert torch.equal(vectors, table[ids])
        torch.testing.assert_close(logits, x @ table.T)


# ----------------------------------------------------------------------------- loading


def test_pitfall_09_each_rank_reads_its_own_part_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of every cut matrix for each of two ranks; the parts cover the whole exactly once."""
    read: dict[tuple[int, str], list[tuple[int, ...]]] = {}

    def rank(comm: Comm) -> int:
        model = build_model(ModelConfig.from_path(folder), comm, dtype=torch.float32)
        load_weights(model, folder, comm, device="cpu", dtype=torch.float32, progress=False)
        covered = {}
        for _, spec in model_shards(model):
            covered[spec.name] = torch.zeros(spec.shape, dtype=torch.int8)
            covered[spec.name][spec.source] += 1
        read[comm.rank, "covered"] = covered  # type: ignore[assignment]
        return sum(p.numel() for p in set(model.parameters()))

    numbers = run_threads(rank, 2)
    whole = rank(SingleRank())
    assert max(numbers) < 0.53 * whole  # norms and two rows of padding are on both
    real = Checkpoint.read
    rows = 0

    def counting(self: Checkpoint, spec: ShardSpec) -> torch.Tensor:
        nonlocal rows
        part = real(self, spec)
        rows += part.numel()
        return part

    monkeypatch.setattr(Checkpoint, "read", counting)
    run_threads(rank, 2)
    assert rows < 1.02 * whole  # both together read the checkpoint once, norms twice
    first, second = read[0, "covered"], read[1, "covered"]
    for name in first:
        both = first[name] + second[name]  # type: ignore[call-overload]
        assert both.min() == both.max(), name
        assert both.max() == (2 if "norm" in name else 1), name


def test_wrong_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    path = make_checkpoint(tmp_path, "llama", drop=(name,))

    def rank(comm: Comm) -> str:
        with pytest.raises(WeightError) as caught:
            tp_drills.logits(comm, path, SEQUENCES)
        return str(caught.value)

    messages = run_threads(rank, 2)
    assert messages[0] == messages[1] == f"weights: missing {name}"


# ---------------------------------------------------------------- processes over sockets


def check_collectives(found: list[dict[str, Any]]) -> None:
    """Every operation of `tp_drills.collectives`, as every rank saw it."""
    size = len(found)
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(size)]
    for seen in found:
        assert torch.equal(seen["sum"], sum(parts))  # type: ignore[arg-type]
        assert torch.equal(seen["last"], torch.cat(parts, -1))
        assert torch.equal(seen["first"], torch.cat(parts, 0))
        assert torch.equal(seen["strided"], torch.cat([part.t() for part in parts], -1))
        assert list(seen["short"]) == ["from", 0]
        assert seen["long"] == {"text": "x" * 5000, "from": size - 1}
        assert seen["nothing"] == []
        assert seen["min"] == [0, 1 - size, 7]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, torch.Tensor]]:
    """A checkpoint of every kind, and its logits by transformers."""
    found = []
    for name in KINDS:
        path = make_kind(tmp_path_factory.mktemp("kind"), name)
        found.append((name, path, reference_logits(path, *SEQUENCES)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_processes_equal_transformers(
    kinds: list[tuple[str, Path, torch.Tensor]], size: int
) -> None:
    """All kinds by one start of ranks; experts cut and whole. Four ranks share two KV heads."""
    whole = [kind for kind in kinds if kind[0].startswith(("qwen3_moe", "mixtral"))]
    jobs = [(path, False) for _, path, _ in kinds] + [(path, True) for _, path, _ in whole]
    found = run_ranks(tp_drills.collectives_and_logits, size, jobs, SEQUENCES, timeout=120)
    check_collectives([seen for seen, _ in found])
    for (name, _, want), *many in zip([*kinds, *whole], *(said for _, said in found), strict=True):
        off = (many[0] - want).abs().max().item()
        assert off < 1e-4 and want.std() > 0.5, (name, off)
        assert all(torch.equal(logits, many[0]) for logits in many), name  # all sample the same


@pytest.mark.parametrize("size", [1, 3])
def test_tensors_of_any_type_and_shape_travel_whole(size: int) -> None:
    """Also those that fill a socket's buffer many times, and those of nothing."""
    shapes = [(), (0, 3), (5,), (3, 1, 2), (700, 900)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8]
    want = [
        torch.arange(math.prod(shape)).view(shape).to(dtype) for shape in shapes for dtype in dtypes
    ]
    comms = socket_pairs(size)

    def rank(index: int) -> None:
        comm = SocketComm(comms[index], index, size)
        for x in want:
            assert torch.equal(comm.all_reduce(x.clone()), sum([x] * (size - 1), x))
            if x.dim():
                assert torch.equal(comm.all_gather(x, 0), torch.cat([x] * size, 0))
            if x.dim() > 1:
                strided = x.transpose(0, 1)
                assert torch.equal(comm.all_gather(strided), torch.cat([strided] * size, -1))
        for count in (0, 1, 1000, 3_000_000):
            for src in range(size):
                text = str(src) * count
                assert comm.broadcast_object(text if index == src else None, src) == text
        comm.close()

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(rank, range(size)))


def test_different_calls_are_an_error() -> None:
    mine, theirs = socket_pairs(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: SocketComm(theirs, 1, 2).all_reduce(torch.zeros(3)))
        comm = SocketComm(mine, 0, 2, timeout=60.0)
        with pytest.raises(CommError, match="12 bytes in place of 8: ranks call differently"):
            comm.all_reduce(torch.zeros(2))
        comm.close()
        with pytest.raises(CommError, match=r"closed|reset|Broken pipe"):
            other.result()


def test_a_rank_that_leaves_is_an_error_of_the_call_that_waits_for_it() -> None:
    told = list[str]()
    mine, theirs = socket_pairs(2)

    def other() -> None:
        SocketComm(theirs, 1, 2).close()

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(other)
        comm = SocketComm(mine, 0, 2, timeout=60.0)
        leaving.result()
    comm.on_failure = lambda: told.append("told")
    for name, call in (
        ("all_reduce", lambda: comm.all_reduce(torch.zeros(1))),
        ("all_gather", lambda: comm.all_gather(torch.zeros(1))),
        ("min_ints", comm.barrier),
        ("broadcast", lambda: comm.broadcast_object([])),
        ("broadcast", lambda: comm.broadcast_object([], src=1)),
    ):
        with pytest.raises(CommError, match=f"^{name} on rank 0 of 2: "):
            call()
    assert len(told) == 5


def test_threads_keep_the_same_protocol() -> None:
    check_collectives(run_threads(tp_drills.collectives, 3))


@pytest.mark.clock
def test_a_thread_that_fails_frees_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run_threads(tp_drills.fail_on_last, 3, timeout=60.0)
    assert time.monotonic() - start < 40


@pytest.mark.parametrize(("dtype", "size"), in_turns(2, [(torch.float32, 2), (torch.float16, 3)]))
def test_rows_are_summed_in_shared_memory(dtype: torch.dtype, size: int) -> None:
    """By the kernel of GPUs that write into each other's memory; the same bits on all ranks."""
    first, *others = run_ranks(tp_drills.sum_rows, size, 6, dtype)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_sum_of_rows_moves_16_bytes_at_a_time() -> None:
    """Rows of 16 bits; the flag and a row's turn are single numbers of 32."""
    moves = {"ld.volatile.global.v4.b32", "st.global.v4.b32"}
    assert run_ranks(tp_drills.compiled_sum, 1) == [
        {*moves, "ld.volatile.global.b32", "st.global.b32"}
    ]


@pytest.mark.parametrize("reach, works", [(True, True), (True, False), (False, True)])
def test_memory_that_one_rank_cannot_map_is_used_by_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reach: bool, works: bool
) -> None:
    parts = [torch.zeros(1), torch.ones(1)]

    def open_handle(*args: Any) -> torch.Tensor:
        if args[7] == 0 and not works:
            raise RuntimeError("no such handle")
        return parts[args[7]]

    def rank(comm: Comm) -> list[torch.Tensor]:
        monkeypatch.setattr(
            nccl, "reduce_tensor", lambda mine: (None, [*range(7), int(mine), *range(7)])
        )
        return nccl.map_buffers(parts[comm.rank], comm)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    monkeypatch.setattr(nccl, "rebuild_cuda_tensor", open_handle)
    found = run_threads(rank, 2)
    assert found == ([parts, parts] if reach and works else [[], []])
    assert ("NCCL sums everything" in caplog.text) == (not (reach and works))


def test_the_fused_model_on_two_ranks_equals_the_plain_one() -> None:
    run_ranks(tp_drills.fused_model, 2)


def living_ranks() -> list[multiprocessing.Process]:
    """Rank processes of this test that are still there."""
    return multiprocessing.active_children()  # type: ignore[return-value]


@pytest.mark.clock
def test_a_long_silence_is_no_error() -> None:
    """An idle server: no message for longer than the timeout of the other operations."""
    group = RankProcesses(tp_drills.long_silence, ranks=range(2), size=2, timeout=1, **QUICK)
    with group:
        assert results(group, 30) == ["hello"] * 2


@pytest.mark.clock
def test_death_of_a_rank_is_raised_with_its_traceback() -> None:
    group = RankProcesses(tp_drills.fail_on_last, ranks=range(2), size=2, **QUICK)
    start = None
    with pytest.raises(WorkerFailed) as caught, group:
        while not group.ended:
            group.listen(0.2)
        start = time.monotonic()
        results(group, 60)
    assert start is not None
    assert time.monotonic() - start < 100
    assert str(caught.value) == "rank 1 failed: ZeroDivisionError: a bug on the last rank"
    assert "in fail_on_last" in caught.value.__notes__[0]
    assert not any(p.is_alive() for p in group.processes.values())


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(WorkerFailed, match="rank 1 was killed by signal 9"):
        run_ranks(tp_drills.vanish_on_last, 2)


def test_the_guilty_rank_is_blamed_not_those_who_lost_it() -> None:
    group = RankProcesses(tp_drills.sleep_long, ranks=range(3), size=3)
    lost = Ending("lost", "failed: connection", "its traceback")
    group.ended = {"rank 0": lost, "rank 1": Ending("failed", "failed: a bug"), "rank 2": lost}
    with pytest.raises(WorkerFailed, match=r"^rank 1 failed: a bug$"):
        group.check()
    group.ended["rank 1"] = Ending("done", None)
    with pytest.raises(WorkerFailed, match=r"^rank 0 failed: connection") as caught:
        group.check()
    assert caught.value.__notes__ == ["In rank 0:\nits traceback"]


@pytest.mark.clock
def test_nobody_waits_for_reports_of_ranks_that_have_ended() -> None:
    """A death is reported a second time on the way out, within the same time."""
    group = RankProcesses(tp_drills.sleep_long, ranks=range(1, 2), size=2)
    group.ended = {"rank 1": Ending("failed", "was killed by signal 9")}
    start = time.monotonic()
    group.listen(60.0)
    assert time.monotonic() - start < 30


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    """A spawned process runs the main script again; it must not start ranks of its own."""
    script = tmp_path / "naive.py"
    script.write_text("from tests.tp_drills import naive_start\nnaive_start()\n")
    process = Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=600)
    assert "rank 1 ended with status 1: it ended before it was ready" in errors
    assert "__main__" in errors


@pytest.mark.drill
@pytest.mark.clock
def test_a_rank_that_hangs_ends_the_group() -> None:
    """Rank 0 gives up after `distributed_timeout`, the parent stops the other."""
    group = RankProcesses(tp_drills.hang_on_last, ranks=range(2), size=2, timeout=3, **QUICK)
    with pytest.raises(WorkerFailed, match="all_reduce on rank 0 of 2"), group:
        results(group, 40)
    assert not any(p.is_alive() for p in group.processes.values())


# ---------------------------------------------------------------- schedulers on several ranks


def settings(
    folder: Path, kind: type[SchedulerConfig] = SchedulerConfig, **fields: Any
) -> SchedulerConfig:
    """A small engine: chunks of 64 tokens, and a pool in which requests must evict."""
    base: dict[str, Any] = {
        "num_pages": 40, "page_size": 4, "max_extend_tokens": 64, "overlap": True,
    }  # fmt: skip
    return kind(model_path=str(folder), device="cpu", **{**base, **fields})


def workload(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 3 to 60 tokens, every second one with the same beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 300, 24).tolist()
    tails = [rng.integers(0, 300, int(n)).tolist() for n in rng.integers(3, 36, count)]
    return [shared + tail if index % 2 else tail for index, tail in enumerate(tails)]


class Script:
    """An outer channel for rank 0 that plays messages by turn: {turn: messages}."""

    def __init__(self, turns: dict[int, list[Msg]]) -> None:
        self.turns, self.turn = dict(turns), 0
        self.tokens: dict[int, list[int | None]] = {}

    def recv(self, block: bool) -> list[Msg]:
        if block:  # idle: the next messages come at once, and finally the end
            later = [turn for turn in self.turns if turn >= self.turn]
            self.turn = min(later, default=self.turn)
            if not later:
                return [ExitMsg()]
        messages = self.turns.pop(self.turn, [])
        self.turn += 1
        return messages

    def send(self, replies: Any) -> None:
        for reply in replies:
            assert isinstance(reply, TokenReply), reply
            self.tokens.setdefault(reply.uid, []).append(reply.token)


def record(scheduler: Scheduler, steps: list[tuple[Any, ...]]) -> None:
    """Note phase, requests and slots of every batch that this scheduler launches."""
    launch = scheduler.launch

    def recorded(batch: Batch) -> Any:
        launched = launch(batch)
        meta = launched.inputs.meta
        uids = [req.uid for req in batch.reqs]
        steps.append((batch.phase, uids, meta.seq_lens.tolist(), launched.inputs.out_loc.tolist()))
        return launched

    scheduler.launch = recorded  # type: ignore[method-assign]


def play(
    comm: Comm, config: SchedulerConfig, turns: dict[int, list[Msg]]
) -> tuple[dict[int, list[int | None]], list[tuple[Any, ...]]]:
    """Run the whole script on one rank: what it answered, and the batches that it built."""
    config = config_of_rank(config, comm.rank, comm.size)
    script = Script(turns)
    channel = BroadcastChannel(script if comm.rank == 0 else None, comm)
    scheduler = build_scheduler(config, channel, comm)
    steps: list[tuple[Any, ...]] = []
    record(scheduler, steps)
    scheduler.run()
    return script.tokens, steps


def busy_script() -> dict[int, list[Msg]]:
    """Requests in waves, greedy and sampled, some aborted while queued or running."""
    turns: dict[int, list[Msg]] = {}
    for uid, prompt in enumerate(workload(24)):
        sampled = {"temperature": 1.0, "top_p": 0.9, "seed": uid if uid % 3 else None}
        params = SamplingParams(
            max_tokens=4 + uid % 9, ignore_eos=True, **(sampled if uid % 2 else {})
        )
        turns.setdefault(uid // 6 * 4, []).append(UserMsg(uid, prompt, params, "ab"[uid % 2]))
    for uid, turn in ((3, 1), (8, 6), (9, 5), (20, 13)):
        turns.setdefault(turn, []).append(AbortMsg(uid))
    return turns


@pytest.mark.parametrize("cache_type", in_turns(2, ["radix", "naive"]))
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_pitfall_05_ranks_build_the_same_batches(
    folder: Path, overlap: bool, cache_type: str, policy: str
) -> None:
    """Same requests, order and slots, under aborts, chunks, eviction and retraction."""
    fields = {"schedule_policy": "fair", "reserve_tokens": 1} if policy == "fair" else {}
    config = settings(folder, overlap=overlap, cache_type=cache_type, **fields)
    one, steps = play(SingleRank(), config, busy_script())
    played = run_threads(play, 2, config, busy_script())
    (tokens, first), (silence, second) = played
    assert len(first) > 20
    assert first == second == steps
    assert tokens == one
    assert silence == {}  # the other rank's replies are dropped
    assert len(tokens) == 24


def test_broadcast_channel_passes_messages_in_order_and_drops_replies() -> None:
    messages: list[Msg] = [AbortMsg(3), UserMsg(4, [1, 2], SamplingParams()), ExitMsg()]
    reply = TokenReply(uid=4, token=7)

    def rank(comm: Comm) -> tuple[list[Msg], list[Any]]:
        outer = InProcessChannel()
        outer.put_messages(*messages)
        channel = BroadcastChannel(outer if comm.rank == 0 else None, comm)
        got = channel.recv(block=False) + channel.recv(block=False)
        channel.send([reply])
        return got, outer.take_replies()

    (first, said), (second, silent) = run_threads(rank, 2)
    assert first == second == messages
    assert (said, silent) == ([reply], [])
    with pytest.raises(ValueError, match="rank 0 alone has a channel"):
        run_threads(lambda comm: BroadcastChannel(InProcessChannel(), comm), 2)


def test_ranks_get_parameters_as_rank_0_has_them() -> None:
    """They are not checked again: a grammar may be converted into a longer one. They are shared."""
    long = with_seed(SentParams(grammar="start: " + "a" * 2 * MAX_GRAMMAR), 1)
    prompt, others = [1, 2], with_seed(long, 2)
    messages = [UserMsg(uid, prompt, long if uid < 9 else others, "a") for uid in range(10)]

    def rank(comm: Comm) -> list[Any]:
        outer = InProcessChannel()
        outer.put_messages(*messages)
        return BroadcastChannel(outer if comm.rank == 0 else None, comm).recv(block=False)

    first, second = run_threads(rank, 2)
    assert first == second == messages
    for got in (first, second):
        assert len({id(msg.sampling_params) for msg in got}) == 2
        assert len({id(msg.input_ids) for msg in got}) == 1
        assert len({id(msg.sampling_params.grammar) for msg in got}) == 1


# ---------------------------------------------------------------- the whole, with processes


def ask(scheduler: Scheduler, channel: InProcessChannel, uid: int, prompts: Any) -> list[Any]:
    """Generate through a scheduler of rank 0, as `LLM` does."""
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    channel.put_messages(*(UserMsg(uid + i, prompt, params) for i, prompt in enumerate(prompts)))
    tokens: dict[int, list[Any]] = {uid + i: [] for i in range(len(prompts))}
    while channel.waiting or scheduler.has_work:
        scheduler.step_overlap()
        for reply in channel.take_replies():
            assert isinstance(reply, TokenReply)
            tokens[reply.uid].append(reply.token)
    return list(tokens.values())


def test_two_processes_generate_the_same_tokens_and_end_together(folder: Path) -> None:
    """Twice, the second time from the cache; then rank 1 is killed and rank 0 reports it."""
    prompts = workload(8)
    channel = InProcessChannel()
    config = settings(folder)
    one = ask(build_scheduler(config, channel), channel, 0, prompts)
    config = config_of_rank(config, 0, 2)
    channel = InProcessChannel()
    with pytest.raises(WorkerFailed, match="rank 1 was killed by signal 9"), Ranks(config) as ranks:
        scheduler = build_scheduler(config, ranks.channel(channel), ranks.comm)
        assert ask(scheduler, channel, 0, prompts) == one
        assert ranks.alive()
        assert ask(scheduler, channel, 100, prompts) == one
        os.kill(ranks.processes.processes["rank 1"].pid or 0, signal.SIGKILL)
        ask(scheduler, channel, 200, prompts)
    assert not living_ranks()


@pytest.mark.usefixtures("quick_ranks")
def test_an_llm_leads_its_ranks() -> None:
    """The same tokens as alone, and nothing is left."""
    prompts, params = workload(4), SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(device="cpu", num_pages=64) as one:
        want = [out["token_ids"] for out in one.generate(prompts, params)]
    with LLM(device="cpu", num_pages=64, tensor_parallel_size=2) as llm:
        for _ in range(2):
            assert [out["token_ids"] for out in llm.generate(prompts, params)] == want
    assert not living_ranks()


@pytest.mark.usefixtures("quick_ranks")
def test_a_process_leads_two_groups_but_only_one_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {"device": "cpu", "num_pages": 64, "tensor_parallel_size": 2}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(**fields) as llm:
        want = llm.generate([[5, 6]], params)[0]["token_ids"]
        with LLM(**fields) as other:
            assert other.generate([[5, 6]], params)[0]["token_ids"] == want
        monkeypatch.setattr(dist, "is_initialized", lambda: True)  # a group of NCCL
        with pytest.raises(ValueError, match=r"tp: must be 1 while another .*shut it down.*got 2"):
            LLM(**fields)
        monkeypatch.undo()
        assert llm.generate([[5, 6]], params)[0]["token_ids"] == want
    assert not living_ranks()


@pytest.mark.clock
@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_killed_at_any_moment_is_told_soon() -> None:
    """`python -m tests.tp_drills 20 8 cpu` does it twenty times."""
    tp_drills.kill_drill(1, 6.0, device="cpu")
    assert not living_ranks()


def test_a_bad_end_of_a_rank_frees_the_gpu() -> None:
    """And takes nothing from the supervisor, which has yet to read the status."""
    for code in (0, 3):
        process = multiprocessing.get_context("fork").Process(target=os._exit, args=(code,))
        process.start()
        for _ in range(2):  # the second time, somebody else has taken the status
            ranks, freed = object.__new__(Ranks), []
            ranks.lost, ranks.stop_waiting = threading.Event(), partial(freed.append, 1)
            ranks.watch(process)
            assert bool(freed) == ranks.lost.is_set() == (code != 0)
            process.join()
            assert process.exitcode == code


def test_graphs_go_before_the_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for them, on the way out of a failure; that the GPU is lost is no error."""
    ranks, done = object.__new__(Ranks), []

    def shutdown() -> None:
        done.append("graphs")
        raise RuntimeError("CUDA error")

    stop = partial(done.append, "processes")
    ranks.processes = SimpleNamespace(stop=stop, links=[[]])  # type: ignore[assignment]
    ranks.stop_waiting = partial(done.append, "kernels")
    monkeypatch.setattr(ranks_module, "leave_group", partial(done.append, "group"))
    ranks.give_up(shutdown)
    assert done == ["processes", "kernels", "graphs", "group"]


def test_nothing_leaves_rank_0_once_a_rank_is_lost() -> None:
    outer, ranks = InProcessChannel(), object.__new__(Ranks)
    ranks.comm, ranks.lost = SingleRank(), threading.Event()  # type: ignore[assignment]
    ranks.explain = fail  # type: ignore[method-assign]
    channel = ranks.channel(outer)
    channel.send([TokenReply(uid=4, token=7)])
    ranks.lost.set()
    with pytest.raises(RuntimeError, match="remote process exited"):
        channel.send([TokenReply(uid=4, token=8)])
    assert [reply.token for reply in outer.take_replies()] == [7]


def test_exit_message_reaches_every_rank(folder: Path) -> None:
    config = settings(folder)
    channel = InProcessChannel()
    channel.put_messages(
        UserMsg(0, [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True)), ExitMsg()
    )

    def rank(comm: Comm) -> None:
        mine = config_of_rank(config, comm.rank, comm.size)
        if comm.rank:
            return tp_worker(comm, mine)
        return build_scheduler(mine, BroadcastChannel(channel, comm), comm).run()

    run_threads(rank, 2)
    last = channel.take_replies()[-1]
    assert isinstance(last, TokenReply)
    assert last.finish_reason == "abort"


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("fails", [False, True])
def test_ranks_leave_their_group(folder: Path, fails: bool) -> None:
    """After an error, too."""
    config = config_of_rank(settings(folder), 0, 2)
    channel = InProcessChannel()
    expected: Any = pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with expected, Ranks(config) as ranks:
        scheduler = build_scheduler(config, ranks.channel(channel), ranks.comm)
        if fails:
            raise ZeroDivisionError
        channel.put_messages(ExitMsg())
        scheduler.run()
    assert not living_ranks()


@pytest.mark.usefixtures("quick_ranks")
def test_ranks_end_even_if_leaving_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(comm: SocketComm) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SocketComm, "close", interrupted)
    ranks = Ranks(config_of_rank(settings(folder), 0, 2))
    ranks.processes.grace = 0.0
    with pytest.raises(KeyboardInterrupt):
        ranks.close()
    assert not living_ranks()


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("kind", [CommError, RuntimeError])
@pytest.mark.parametrize("reason", ["", "rank 1 failed: CUDA out of memory"])
def test_a_rank_that_cannot_join_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str, kind: type[RuntimeError]
) -> None:
    """Rank 0 loses its connection; the other rank's message explains it, if there is one."""

    tried: list[Any] = []

    def lost(*place: Any) -> SocketComm:
        tried.append(place)
        raise kind("connection closed by peer")

    def check(processes: RankProcesses) -> None:
        if reason and tried:
            raise WorkerFailed(reason)

    monkeypatch.setattr("minisgl.runtime.ranks.join", lost)
    monkeypatch.setattr(RankProcesses, "check", check)
    error, said = (WorkerFailed, "CUDA out of memory") if reason else (kind, "closed by peer")
    with pytest.raises(error, match=said):
        Ranks(config_of_rank(settings(folder), 0, 2))
    assert not living_ranks()


class LateConfig(SchedulerConfig):
    """A config that another process does not read in time."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


@pytest.mark.clock
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("size", "dead"), [(2, 1), (4, 3)])
def test_a_rank_that_dies_before_ranks_have_met_is_told_soon(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, dead: int
) -> None:
    """While rank 0 waits for it, or for another one."""

    def meet(place: Place) -> SocketComm:
        (victim,) = (p for p in living_ranks() if p.name.endswith(f"rank {dead}"))
        threading.Timer(0.5, victim.kill).start()
        return join(place)

    monkeypatch.setattr(sockets, "START_SECONDS", LIMIT + 1)
    monkeypatch.setattr(RankProcesses, "starting", lambda group: False)
    monkeypatch.setattr(ranks_module, "join", meet)
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"rank {dead} was killed by signal 9"):
        Ranks(config_of_rank(settings(folder, LateConfig), 0, size))
    assert time.monotonic() - start < LIMIT
    assert not living_ranks()


def fail() -> None:
    raise RuntimeError("NCCL error: remote process exited")


@pytest.mark.clock
@pytest.mark.parametrize("leave", [threading.Event().wait, fail])
def test_leaving_does_not_wait_for_dead_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leave: Any
) -> None:
    """Nor does it fail for them, or print a traceback: their own end has been reported."""
    monkeypatch.setattr(nccl, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(nccl.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(nccl.dist, "destroy_process_group", leave)
    start = time.monotonic()
    leave_group()
    assert time.monotonic() - start < 50
    assert capsys.readouterr().err == ""


def test_the_store_is_there_until_all_ranks_have_left_it(tmp_path: Path) -> None:
    """NCCL's threads may read it meanwhile."""
    links, there = socket_pairs(2), list[bool]()
    store = tempfile.TemporaryDirectory(dir=tmp_path)
    comms = [object.__new__(nccl.NcclComm) for _ in links]
    for comm, mine, its in zip(comms, links, (store, None), strict=True):
        comm.links, comm.folder, comm.peers, comm.views = mine, its, {}, []

    def leave_late() -> None:
        there.append(Path(store.name).exists())
        comms[1].close()

    timer = threading.Timer(0.3, leave_late)
    timer.start()
    comms[0].close()
    timer.join()
    assert there == [True] and not Path(store.name).exists()


def test_impossible_split_is_refused_before_processes_start(folder: Path) -> None:
    with pytest.raises(ValueError, match="tp_size"):
        Ranks(config_of_rank(settings(folder), 0, 3))
    assert not living_ranks()


def test_one_gpu_is_not_shared_by_ranks(folder: Path) -> None:
    config = config_of_rank(replace(settings(folder), device="cuda:0"), 0, 2)
    with pytest.raises(ValueError, match=r"device: .*a GPU for each of 2 ranks.*cuda:0"):
        Ranks(config)


@pytest.mark.parametrize(
    ("how", "status"), [("forgets", 0), ("forked", 0), ("failed", 1), ("killed", -signal.SIGKILL)]
)
def test_a_program_ends_with_the_ranks_that_it_left_open(
    tmp_path: Path, how: str, status: int
) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(
        f"from tests.tp_drills import orphan\nif __name__ == '__main__':\n    orphan({how!r})"
    )
    # A fork's process would end what it leaves behind.
    parent = Popen([sys.executable, str(script)], real=True, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert parent.wait(300) == status
    parent.stdout.close()
    deadline = time.monotonic() + 100
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
