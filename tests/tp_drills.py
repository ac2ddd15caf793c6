"""Entry functions of ranks in the tensor-parallel tests; importable by spawned processes."""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import random
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.benchmark.report import save
from minisgl.config.model import ModelConfig
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.models.quantization import quantize_model
from minisgl.models.registry import build_model
from minisgl.models.weights import load_weights
from minisgl.parallel.comm import Comm
from minisgl.runtime.ranks import Place, RankProcesses, join
from minisgl.runtime.supervisor import WorkerFailed
from tests.dense import dense_batch
from tests.interpreter import quicken

# A server process that has imported torch once is forked for every rank: seconds less per test.
multiprocessing.set_forkserver_preload(["tests.tp_drills", "minisgl.runtime.ranks"])
QUICK: dict[str, Any] = {"method": "forkserver"}
NAMED = r"rank [1-9] was killed by signal 9"
LIMIT = 5.0  # seconds within which a killed rank has to be reported


@pytest.fixture
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `Ranks` starts are forked from it, too."""
    monkeypatch.setitem(RankProcesses.__init__.__kwdefaults__, "method", "forkserver")


class ThreadComm:
    """One rank of a group of threads: the protocol of `Comm` by a table and a barrier."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.table, self.gate = rank, len(table), table, barrier

    def exchange(self, mine: Any) -> list[Any]:
        """Return what the ranks put into the table, in the order of the ranks."""
        self.table[self.rank] = mine
        self.gate.wait()  # everything lies there
        everything = list(self.table)
        self.gate.wait()  # all have read it: the table may be used again
        return everything

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(x)).sum(0)  # new memory: others still read `x`

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim)

    def barrier(self) -> None:
        self.exchange(None)

    def broadcast_object(self, obj: Any, src: int = 0, kind: Any = Any) -> Any:
        return self.exchange(obj)[src]

    def min_ints(self, values: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self.exchange(list(values)))]


def run_threads(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call `function(comm, *args)` on `size` ranks; their results in order, or the first error."""
    table, barrier = [None] * size, threading.Barrier(size, timeout=timeout)

    def rank(index: int) -> Any:
        try:
            return function(ThreadComm(index, table, barrier), *args)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def results(group: RankProcesses, timeout: float) -> list[Any]:
    """Return the results of all ranks, in order; raise WorkerFailed as soon as one fails."""
    deadline = time.monotonic() + timeout
    while len(group.ended) < len(group.processes):
        group.listen(0.2)
        group.check()
        if time.monotonic() > deadline:
            raise WorkerFailed(f"no result within {timeout:g} s")
    group.check()
    return [ending.value for _, ending in sorted(group.ended.items())]


def run_ranks(entry: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `entry(comm, *args)` in `size` new CPU processes; their results in order."""
    with RankProcesses(entry, args, ranks=range(size), size=size, **QUICK) as group:
        return results(group, timeout)


def logits(
    comm: Comm, folder: Path, sequences: Sequence[Sequence[int]], expert_parallel: bool = False,
    device: str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """Logits [n, vocab] of whole sequences by this rank's part of the model."""
    config = ModelConfig.from_path(folder)
    model = build_model(config, comm, dtype=torch.float32, expert_parallel=expert_parallel)
    quantize_model(model, "none", folder)
    load_weights(model, folder, comm, device=device, dtype=torch.float32, progress=False)
    with torch.inference_mode():
        return model(dense_batch(sequences, device=device)).cpu().clone()


def collectives(comm: Comm) -> dict[str, Any]:
    """Every operation once."""
    x = torch.arange(6.0).view(2, 3) + 10 * comm.rank
    long = {"text": "x" * 5000, "from": comm.rank}
    comm.barrier()
    return {
        "sum": comm.all_reduce(x.clone()),
        "last": comm.all_gather(x),
        "first": comm.all_gather(x, dim=0),
        "strided": comm.all_gather(x.t()),
        "short": comm.broadcast_object(("from", comm.rank)),
        "long": comm.broadcast_object(long, src=comm.size - 1),
        "nothing": comm.broadcast_object([]),
        "min": comm.min_ints([comm.rank, -comm.rank, 7]),
    }


def collectives_and_logits(
    comm: Comm, jobs: Sequence[tuple[Path, bool]], sequences: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Every operation once, and logits by each model; `jobs` say whose, and if by whole experts."""
    return collectives(comm), [logits(comm, folder, sequences, whole) for folder, whole in jobs]


def device_logits(
    comm: Comm, jobs: Sequence[tuple[Path, bool]], sequences: Sequence[Sequence[int]],
    devices: Sequence[str],
) -> list[torch.Tensor]:  # fmt: skip
    """Logits by each model, on this rank's device."""
    device = devices[comm.rank]
    return [logits(comm, folder, sequences, whole, device) for folder, whole in jobs]


def cuda_collectives(comm: Comm) -> dict[str, Any]:
    """The operations on CUDA tensors over NCCL, and a sum recorded in a CUDA graph."""
    device = torch.device("cuda", comm.rank)
    x = torch.arange(6.0, device=device).view(2, 3) + 10 * comm.rank
    seen = {"sum": comm.all_reduce(x.clone()), "last": comm.all_gather(x), "cpu": collectives(comm)}
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    comm.all_reduce(static.clone())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = comm.all_reduce(static * 1.0)
    static.fill_(comm.rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    seen["replayed"] = out
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in seen.items()}


def cuda_sums(comm: Comm) -> list[torch.Tensor]:
    """Sums of random rows on GPUs, by whatever way serves each size, and replayed from a graph."""
    device, said = torch.device("cuda", comm.rank), []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, width in ((1, 256), (3, 5120), (64, 5120), (256, 1000), (257, 5120)):
            gen = torch.Generator(device).manual_seed(rows)
            parts = torch.randn(comm.size, 2, rows, width, generator=gen, device=device)
            parts[:, :, :, :2] = -0.0
            residual = torch.randn(rows, width, generator=gen, device=device).to(dtype)
            norm = torch.randn(width, generator=gen, device=device).to(dtype)
            sums = parts.sum(1).to(dtype)
            exact, mine = sums.double().sum(0), sums[comm.rank].clone()

            def step(mine=mine, parts=parts, residual=residual, norm=norm):  # type: ignore[no-untyped-def]
                total = comm.all_reduce(mine * 1)
                both = comm.all_reduce_add_norm(parts[comm.rank], residual, norm, 1e-6)  # type: ignore[attr-defined]
                return [total, *(both or ())]

            eager = step()
            limit = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(eager[0].double(), exact, atol=limit, rtol=limit)
            assert (len(eager) == 3) == (rows <= 256), "a kernel of our own serves few rows"
            if len(eager) == 3:
                torch.testing.assert_close(eager[2].double(), exact + residual.double(),
                                           atol=limit, rtol=limit)  # fmt: skip
                want = torch.nn.functional.rms_norm(
                    eager[2].double(), (width,), norm.double(), 1e-6
                )
                torch.testing.assert_close(eager[1].double(), want, atol=limit, rtol=limit)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                recorded = step() + step() + step()[:1]
            for turn in range(7):
                for part in recorded:
                    part.zero_()
                graph.replay()
                if turn % 2:  # eager calls between replays
                    assert all(torch.equal(a, b) for a, b in zip(eager, step(), strict=True))
                for part, want in zip(recorded, [*eager, *eager, eager[0]], strict=True):
                    assert torch.equal(part, want)
            said += [part.cpu() for part in eager]
    return said


def share_memory(comm: Comm, width: int, rows: int, dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Buffers of all ranks for the kernel, in memory that processes share."""
    from minisgl.kernels.all_reduce import PeerBuffers, empty_entry

    count = 3 * comm.size * rows * width
    mine = SharedMemory(create=True, size=count * dtype.itemsize)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    torch.frombuffer(mine.buf, dtype=bits).fill_(empty_entry(dtype))
    names = [comm.broadcast_object(mine.name, src=rank) for rank in range(comm.size)]
    parts = [mine if rank == comm.rank else SharedMemory(name) for rank, name in enumerate(names)]
    addresses = torch.tensor([torch.frombuffer(p.buf, dtype=bits).data_ptr() for p in parts])
    comm.barrier()
    mine.unlink()
    turns, quit = torch.zeros(rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return PeerBuffers(addresses, turns, quit, comm.rank, width), parts


def interpret() -> None:
    """Let Triton's interpreter run the kernels of this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()


def sum_rows(comm: Comm, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sums of random rows by the kernel, each rank at its own pace, against plain PyTorch."""
    interpret()
    from minisgl.kernels import all_reduce as kernels

    rows, width, said, pace = 4, 24, [], random.Random(comm.rank)
    peers, memory = share_memory(comm, width, rows, dtype)
    for step in range(steps):
        gen = torch.Generator().manual_seed(step)
        m = int(torch.randint(1, rows + 1, (1,), generator=gen))
        parts = torch.randn(comm.size, 2, m, width, generator=gen)
        parts[:, :, :, 0] = -0.0  # its bits are those of an entry that has not come
        residual = torch.randn(m, width, generator=gen).to(dtype)
        norm = torch.randn(width, generator=gen).to(dtype)
        sums = parts.sum(1).to(dtype)
        time.sleep(pace.choice([0, 0, 0.003]))
        if step % 3 == 0:
            got = kernels.all_reduce(sums[comm.rank], peers)
            torch.testing.assert_close(got, sums.float().sum(0).to(dtype), atol=1e-2, rtol=1e-2)
        else:
            out, got = kernels.all_reduce_add_norm(parts[comm.rank], residual, norm, 1e-6, peers)
            want = (sums.float().sum(0) + residual.float()).to(dtype)
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
            want = torch.nn.functional.rms_norm(got.float(), (width,), norm.float(), 1e-6)
            torch.testing.assert_close(out, want.to(dtype), atol=1e-2, rtol=1e-2)
        said.append(got)
    peers.quit.fill_(1)
    if comm.rank == 0:  # no other rank comes: without the flag this would hang
        kernels.all_reduce(sums[0], peers)
    assert memory
    return said


def compiled_sum(comm: Comm) -> set[str]:
    """Return loads and stores of the sum of wide rows, compiled for an H100."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minisgl.kernels import all_reduce as kernels

    fixed: dict[str, Any] = {
        "RANK": comm.rank, "SIZE": 2, "PARTS": 1, "NORM": True, "BITS": kernels.BITS[2],
        "EMPTY": kernels.empty_entry(torch.bfloat16), "BLOCK": 8192, "PDL": True,
    }  # fmt: skip
    kinds = {"addresses_ptr": "*i64", "turns_ptr": "*i32", "quit_ptr": "*i32", "eps": "fp32"}
    types, multiples = {}, {}
    for place, name in enumerate(kernels.all_reduce_kernel.arg_names):
        usual = "constexpr" if name in fixed else "*bf16" if name.endswith("_ptr") else "i32"
        types[name] = kinds.get(name, usual)
        if name.endswith("_ptr") or name in ("N", "rows", "WIDTH"):
            multiples[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernels.all_reduce_kernel, types, fixed, multiples)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    return set(re.findall(r"\b(?:ld\.volatile|st)\.global\.\S+", code.asm["ptx"]))


def fused_model(comm: Comm) -> None:
    """The fused model on several ranks equals the plain one, in Triton's interpreter."""
    interpret()
    from tests.fused_cases import check_model, enlarge_blocks, small_model

    enlarge_blocks(setattr)
    torch.manual_seed(0)  # norms are the same on all ranks
    few = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1}
    model = small_model("qwen3", comm=comm, **few, **sizes)
    check_model(model, [9], None)
    check_model(model, [5, 20], None)
    check_model(model, [2, 6], [2, 3])


def kill_a_rank(delay: float, ready: bool = False, ranks: int = 2, **fields: Any) -> dict[str, Any]:
    """Kill a rank `delay` seconds after an `LLM` starts, or after its first answers.

    Returns the moment, what the engine was doing, the seconds from there to the error, and the
    error. Later than `LIMIT`, all threads of this process print where they stand.
    """
    killed: dict[str, Any] = {}

    def kill() -> None:
        while not (victims := multiprocessing.active_children()):
            time.sleep(0.01)
        killed["state"] = "starting" if llm is None else "generating"
        killed["at"] = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT, repeat=True, file=sys.__stderr__)
        victims[-1].kill()

    llm = None
    timer = threading.Timer(delay, kill)
    prompts, params = [[5, 6, 7]] * 8, SamplingParams(max_tokens=1000, ignore_eos=True)
    try:
        if not ready:
            timer.start()
        llm = LLM(tensor_parallel_size=ranks, num_pages=256, **fields)
        if ready:  # kernels are compiled at their first use, without a heartbeat
            llm.generate(prompts, replace(params, max_tokens=8))
            timer.start()
        while time.monotonic() - killed.get("at", time.monotonic()) < 30:
            llm.generate(prompts, params)
    except WorkerFailed as error:
        if not killed:
            raise
        told = round(time.monotonic() - killed["at"], 2)
        about = {"after_s": round(delay, 2), "state": killed["state"], "told_s": told}
        return about | {"error": str(error)}
    finally:
        timer.cancel()
        if llm is not None:
            llm.shutdown()
        faulthandler.cancel_dump_traceback_later()
    raise AssertionError(f"a rank was killed {delay:.2f} s after the start, and nothing happened")


def kill_drill(
    times: int, seconds: float, ready: bool = False, ranks: int = 2, **fields: Any
) -> list[dict[str, Any]]:
    """Kill a rank other than 0 at `times` random moments of `seconds`; fail after all of them."""
    draw, kills = random.Random(times), []
    for _ in range(times):
        kill = kill_a_rank(draw.uniform(0.0, seconds), ready, ranks, **fields)
        print("killed {state} after {after_s} s, told within {told_s} s: {error}".format(**kill),
              flush=True)  # fmt: skip
        kills.append(kill)
        assert not multiprocessing.active_children()
    wrong = [kill for kill in kills if kill["told_s"] > LIMIT or not re.match(NAMED, kill["error"])]
    assert not wrong, wrong
    return kills


def fail_on_last(comm: Comm) -> None:
    """The last rank has a bug, the others wait for it."""
    if comm.rank == comm.size - 1:
        raise ZeroDivisionError("a bug on the last rank")
    comm.all_reduce(torch.zeros(3))


def vanish_on_last(comm: Comm) -> None:
    """The last rank ends without a word, the others wait for a message."""
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), 9)
    comm.broadcast_object(None, src=comm.size - 1)


def hang_on_last(comm: Comm) -> None:
    """The last rank never comes."""
    if comm.rank == comm.size - 1:
        time.sleep(60)
    comm.all_reduce(torch.zeros(3))


def long_silence(comm: Comm) -> str:
    """Rank 0 sends a message after a while."""
    if comm.rank == 0:
        time.sleep(2.5)
    return comm.broadcast_object("hello" if comm.rank == 0 else None)


def sleep_long(comm: Comm) -> None:
    """Do something that neither needs the others nor notices them."""
    time.sleep(30)


def naive_start() -> None:
    """Start a rank by spawning, as a script without a guard would."""
    with RankProcesses(sleep_long, ranks=range(1, 2), size=2) as group:
        while group.starting():
            group.listen(0.2)


def orphan(how: str) -> None:
    """Start another rank, print its process id, and end without closing anything."""
    group = RankProcesses(sleep_long, ranks=range(1, 2), size=2).__enter__()
    join(Place(0, 2, "cpu", 60.0, group.links[0]))
    print(group.processes["rank 1"].pid, flush=True)
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "forked":
        if os.fork() == 0:
            with suppress(AssertionError):  # it may not wait for a rank, which is no child of its
                multiprocessing.util._exit_function()  # type: ignore[attr-defined]
            os._exit(0)
        os.wait()
        assert group.processes["rank 1"].is_alive()
    assert how != "failed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.tp_drills")
    parser.add_argument("times", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    more: dict[str, Any] = {"ranks": args.ranks}
    if args.device == "cuda":  # GPUs notice a lost connection only after `distributed_timeout`
        more |= {"ready": True, "attention_backend": "triton,fused"}  # FlashInfer builds a minute
    found = kill_drill(args.times, args.seconds, device=args.device, **more)
    if args.report:
        words = [Path(word).name for word in sys.argv[1:]]
        command = shlex.join(["python", "-m", "tests.tp_drills", *words])
        save(args.report, {"limit_s": LIMIT, "kills": found}, command)
