"""Two ranks on two GPUs: the collectives, and a server from its start to its end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.parallel.comm import SingleRank
from minisgl.runtime.ranks import RankProcesses
from tests import tp_drills
from tests.checkpoints import GPU_SIZES, KINDS, make_checkpoint, make_kind
from tests.serving import Served, last_event, stream
from tests.test_tensor_parallel import SEQUENCES, check_collectives

DEVICE, DEVICES = "cuda", ["cuda:0", "cuda:1"]
BACKENDS = {"float32": "triton", "bfloat16": "triton,fused"}  # FlashInfer builds for a minute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SUMS = [(a, b) for a in (7, 31, 208) for b in (5, 44, 130)]
TALKS = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in SUMS]
TALKS += [
    [{"role": "user", "content": f"Tell me a story about a {who}."}] for who in ("fox", "hen")
]


def test_nccl_processes_and_graph() -> None:
    group = RankProcesses(tp_drills.cuda_collectives, ranks=range(2), size=2, devices=DEVICES)
    with group:
        found = tp_drills.results(group, 300)
    check_collectives([seen["cpu"] for seen in found])
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)]
    for seen in found:
        assert torch.equal(seen["sum"], parts[0] + parts[1])
        assert torch.equal(seen["last"], torch.cat(parts, -1))
        assert torch.equal(seen["replayed"], torch.full((2, 3), 3.0))


def test_sums_of_every_size_and_their_replay() -> None:
    """Against double precision; eager, replayed and on both ranks the same bits."""
    group = RankProcesses(tp_drills.cuda_sums, ranks=range(2), size=2, devices=DEVICES)
    with group:
        first, second = tp_drills.results(group, 300)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_llm_on_several_gpus_answers_as_on_one(ranks: int) -> None:
    """Twice in one process; float32 to the last token, bfloat16 by kernels that sum."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    params = SamplingParams(temperature=0.0, max_tokens=64)
    for dtype in ("float32", "bfloat16"):
        fields = {"dtype": dtype, "attention_backend": BACKENDS[dtype]}
        with LLM(device=DEVICE, num_pages=512, **fields) as one:
            want = [out["text"] for out in one.chat(TALKS, params)]
        with LLM(device=DEVICE, num_pages=512, tensor_parallel_size=ranks, **fields) as many:
            found = [out["text"] for out in many.chat(TALKS, params)]
            peers = many.ranks.comm.peers
            assert len(peers) == 1 and None not in peers.values()
        if dtype == "float32":
            assert found == want
        assert all(str(a + b) in text for (a, b), text in zip(SUMS, found, strict=False))


def test_every_kind_of_checkpoint_on_two_gpus_equals_one(tmp_path: Path) -> None:
    """Families and layouts of experts, cut and whole, by one start of ranks, in float32."""
    jobs, names = [], []
    for name, (arch, _) in KINDS.items():
        path = make_kind(tmp_path / name, name, **GPU_SIZES)
        for whole in (False, True) if arch in ("qwen3_moe", "mixtral") else (False,):
            jobs.append((path, whole))
            names.append(f"{name}, whole experts" if whole else name)
    entry, args = tp_drills.device_logits, (jobs, SEQUENCES, DEVICES)
    with RankProcesses(entry, args, ranks=range(2), size=2, devices=DEVICES) as group:
        first, second = tp_drills.results(group, 300)
    for name, (path, _), ours, theirs in zip(names, jobs, first, second, strict=True):
        one = tp_drills.logits(SingleRank(), path, SEQUENCES, device=DEVICES[0])
        off = (ours - one).abs().max().item()
        assert off < 1e-3 and one.std() > 0.5, (name, off)
        assert torch.equal(ours, theirs), name  # both ranks sample the same token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["whole", "cut"])
def test_experts_on_two_gpus_answer_as_on_one(tmp_path: Path, how: str, dtype: str) -> None:
    """Tokens in float32; in bfloat16, by recorded fused kernels, nearly the same probabilities."""
    sizes = {"hidden_size": 256, "head_dim": 64, "num_experts": 16, "moe_intermediate_size": 64}
    path = make_checkpoint(tmp_path, "qwen3_moe", vocab_size=1000, **sizes)
    prompts = [list(range(first, first + 20)) for first in range(1, 60, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)

    def answers(dtype: str, **fields: Any) -> list[dict[str, Any]]:
        few = {"num_pages": 512, "max_running_req": 8, "cuda_graph_bs": (8,)}
        fields |= {"dtype": dtype, "attention_backend": BACKENDS[dtype]}
        with LLM(path, device=DEVICE, **few, **fields) as llm:
            return llm.generate(prompts, params)

    want = answers("float32")
    found = answers(dtype, tensor_parallel_size=2, expert_parallel=how == "whole")
    if dtype == "float32":
        assert [out["token_ids"] for out in found] == [out["token_ids"] for out in want]
    off = []  # for the first two tokens: of a prefill, and of a captured step
    for ours, theirs in zip(found, want, strict=True):
        for a, b in list(zip(ours["logprobs"], theirs["logprobs"], strict=True))[:2]:
            same = a["token_id"] == b["token_id"]
            off.append(abs(a["logprob"] - b["logprob"]) if same else float("inf"))
    assert sorted(off)[len(off) // 2] < 0.05, off  # a token near a tie takes other experts


def test_a_killed_rank_ends_an_llm() -> None:
    """In a process of its own, which has to end, too; `python -m tests.tp_drills 20 4 cuda`."""
    command = [sys.executable, "-m", "tests.tp_drills", "3", "4", DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rank 1 was killed by signal 9") == 3


def two_ranks(folder: Path, dtype: str = "bfloat16") -> Served:
    """The embedded model on two devices; a new process, because CUDA does not survive a fork."""
    flags = ["--tp", "2", "--device", DEVICE, "--log-format", "none", "--num-pages", "512"]
    flags += ["--dtype", dtype, "--attention-backend", BACKENDS[dtype]]
    return Served(folder, *flags, real=True)


def answer(url: str, talk: list[dict[str, str]]) -> str:
    """Return a greedy server's answer."""
    body = {"messages": talk, "temperature": 0, "max_tokens": 64}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=120).json()
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_answer_as_one_does(tmp_path: Path, dtype: str) -> None:
    """In float32 to the last token; in half precision the sums must be right."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    fields = {"dtype": dtype, "attention_backend": BACKENDS[dtype]}
    with LLM(device=DEVICE, num_pages=512, **fields) as llm:
        want = [out["text"] for out in llm.chat(TALKS, params)]
    served = two_ranks(tmp_path, dtype)
    url = served.ready()
    children = served.children()
    found = [answer(url, talk) for talk in TALKS]
    served.process.terminate()
    started = time.monotonic()
    assert not served.ended(children)
    assert time.monotonic() - started < 10  # graphs that hold collectives let the group go
    if dtype == "float32":
        assert found == want
    assert all(str(a + b) in text for (a, b), text in zip(SUMS, found, strict=False))


def test_a_killed_rank_ends_the_server(tmp_path: Path) -> None:
    """All GPUs are freed, and every stream gets an error."""
    served = two_ranks(tmp_path)
    url = served.ready()
    children = served.children()
    rank: psutil.Process = served.workers()[0].children()[-1]
    with stream(url, n=8) as response:
        lines = response.iter_lines()
        next(lines)
        rank.send_signal(signal.SIGKILL)
        started = time.monotonic()
        assert "[DONE]" not in last_event(lines)
        assert time.monotonic() - started < 5
    assert "rank 1 was killed by signal 9" in served.ended(children, status=1)


def test_ctrl_c_with_answers_under_way(tmp_path: Path) -> None:
    """The second signal does not wait for them; ranks leave together."""
    served = two_ranks(tmp_path)
    url = served.ready()
    children = served.children()
    with stream(url, n=8) as response:
        lines = response.iter_lines()
        next(lines)
        for _ in range(2):
            served.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert "the server is shutting down" in last_event(lines)
    assert not served.ended(children)
