"""The offline interface: tokens equal to transformers', what it accepts, returns, refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import minisgl
from minisgl import LLM, SamplingParams
from minisgl.benchmark.offline import launches
from minisgl.config.engine import SchedulerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import Phase, Req
from minisgl.engine.step import SampledTokens
from minisgl.kvcache.audit import check_integrity
from minisgl.llm import OutputBuilder, as_params, as_prompts
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import UserMsg
from minisgl.scheduler.requests import token_reply
from minisgl.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.fakes import record_on_a_cpu
from tests.turns import in_turns

GREEDY = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llm"), "qwen3", seed=2, tokenizer=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, page_size=4, max_running_req=16, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def by_transformers(folder: Path) -> list[tuple[list[int], list[int]]]:
    """64 random prompts, half with a common beginning, and their greedy answers in float32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = np.random.default_rng(0)
    common = rng.integers(0, 256, 40).tolist()
    found = []
    for i in range(64):
        prompt = common[: 40 * (i % 2)] + rng.integers(0, 256, rng.integers(1, 50)).tolist()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
        found.append((prompt, answer[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("overlap", in_turns(2, [False, True]), ids=["plain", "overlap"])
def test_64_prompts_as_transformers(folder: Path, by_transformers: Any, overlap: bool) -> None:
    prompts = [prompt for prompt, _ in by_transformers]
    with LLM(folder, page_size=16, max_extend_tokens=200, device="cpu", overlap=overlap) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=12))
    assert len(outs) == 64
    assert sum(out["cached_tokens"] for out in outs) > 0
    for (prompt, wanted), out in zip(by_transformers, outs, strict=True):
        assert out["token_ids"] == wanted
        assert out["prompt_tokens"] == len(prompt)
        ended = out["token_ids"][-1] == 318
        assert out["finish_reason"] == ("stop" if ended else "length")


@pytest.mark.parametrize("named", [True, False])
def test_every_scheduler_knows_its_end_tokens(tmp_path: Path, named: bool) -> None:
    """Those that the model's config names, or else its tokenizer's: a server has them, too."""
    shutil.copytree(resolve_model_path(None), tmp_path, dirs_exist_ok=True)
    for name in () if named else ("config.json", "generation_config.json"):
        if (path := tmp_path / name).is_file():
            about = json.loads(path.read_text())
            about.pop("eos_token_id", None)
            path.write_text(json.dumps(about))
    config = SchedulerConfig(model_path=str(tmp_path), device="cpu", num_pages=64)
    scheduler = build_scheduler(config, InProcessChannel())
    assert scheduler.eos_token_ids == set(Tokenizer(tmp_path).eos_token_ids) != set()
    choice = UserMsg(0, [5], SamplingParams(choice=["yes", "no"]))
    assert scheduler.make_req(choice).matcher is not None


def test_the_dictionaries(llm: LLM) -> None:
    outs = llm.generate(["hello", [1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=16))
    assert [set(out) for out in outs] == [
        {"text", "token_ids", "finish_reason", "prompt_tokens", "cached_tokens"}
    ] * 2
    for out in outs:
        assert isinstance(out["text"], str) and len(out["token_ids"]) == 16
        assert all(type(token) is int for token in out["token_ids"])
        assert out["finish_reason"] == "length"
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(out["token_ids"]) == out["text"]


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")  # type: ignore[union-attr]
    forms: list[Any] = [
        "hello", ["hello"], ids, ids.tolist(), tuple(ids.tolist()), list(ids), [ids],
        [ids.tolist()], ids.astype(np.int64), ids[None, :], [torch.from_numpy(ids)],
        torch.from_numpy(ids),
    ]  # fmt: skip
    answers = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(a) == 1 for a in answers)
    assert len({tuple(a[0]["token_ids"]) for a in answers}) == 1
    assert llm.generate([], GREEDY) == []


def test_forms_without_a_model() -> None:
    assert as_prompts("a") == ["a"] and as_prompts([1, 2]) == [[1, 2]]
    assert as_prompts([[1], "b"]) == [[1], "b"]
    params = [SamplingParams(), GREEDY]
    assert as_params(params, 2) == params and as_params(params[0], 3) == params[:1] * 3
    with pytest.raises(ValueError, match="3 prompts need 3, got 2"):
        as_params(params, 3)
    with pytest.raises(ValueError, match="prompts: must be"):
        as_prompts(5)


def test_one_answer_for_each_of_a_list_of_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (1, 5, 3)]
    outs = llm.generate(["hello"] * 3, params)
    assert [len(out["token_ids"]) for out in outs] == [1, 5, 3]


def test_the_prefix_stays_cached(llm: LLM) -> None:
    prompt = [7] * 30
    first = llm.generate(prompt, GREEDY)[0]
    second = llm.generate(prompt, GREEDY)[0]
    assert second["token_ids"] == first["token_ids"]
    assert second["cached_tokens"] == 28


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"prompts\[1\]: .*at least one token"),
        ([[1], [320]], r"prompts\[1\]: .*0\.\.319, got 320"),
        ([[-1]], r"prompts\[0\]: .*got -1"),
        ([[1] * 512], r"prompts\[0\]: .*512 tokens are too many"),
        ([[1.5]], r"prompts\[0\]: .*flat list of integers"),
        ([None], r"prompts\[0\]"),
        ([[[1]]], r"prompts\[0\]: .*flat"),
        ([""], r"prompts\[0\]: .*at least one token"),
        (["a", "\ud800"], r"prompts\[1\]: .*unpaired surrogate"),
        ({"a": 1}, "prompts: must be"),
        (np.array(5), "prompts: must be"),
    ],
)
def test_invalid_prompts_are_refused_before_anything_runs(
    llm: LLM, prompts: Any, message: str
) -> None:
    step = llm.scheduler.step_count
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.scheduler.step_count == step and not llm.scheduler.has_work
    assert not llm.channel.waiting


def test_pitfall_12_bad_parameters_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        SamplingParams(max_tokens=-1)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=float("nan"))
    assert len(llm.generate("hello", GREEDY)[0]["token_ids"]) == 8


def test_pitfall_10_a_pool_smaller_than_the_window(folder: Path) -> None:
    with LLM(folder, num_pages=4, page_size=16, device="cpu") as llm:
        with pytest.raises(ValueError, match="KV cache holds 64"):
            llm.generate([1] * 64, GREEDY)
        (out,) = llm.generate([1] * 60, SamplingParams(max_tokens=100, ignore_eos=True))
        assert len(out["token_ids"]) == 4 and "clamped from 100 to 4" in out["notice"]
        outs = llm.generate([[t] * 30 for t in range(9)], SamplingParams(max_tokens=20))
        assert len(outs) == 9


def test_no_max_tokens_means_up_to_the_window(llm: LLM) -> None:
    (out,) = llm.generate([5] * 500, SamplingParams(ignore_eos=True))
    assert len(out["token_ids"]) == 12 and "notice" not in out


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    whole = llm.generate([3, 1, 4], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    text = whole["text"]
    stop = text[10:12]
    cut = text.index(stop)
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop, "never there"])
    before = llm.scheduler.step_count
    outs = llm.generate([[3, 1, 4], [3, 1, 4]], [params, SamplingParams(max_tokens=12)])
    assert llm.scheduler.step_count - before < 30, "nobody told the scheduler"
    assert outs[0]["text"] == text[:cut] and outs[0]["finish_reason"] == "stop"
    assert len(outs[0]["token_ids"]) < 40
    assert outs[0]["token_ids"] == whole["token_ids"][: len(outs[0]["token_ids"])]
    assert not llm.scheduler.has_work


def test_stop_tokens_end_the_answer_and_are_not_text(llm: LLM) -> None:
    whole = llm.generate([3, 1, 4], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    stop = whole["token_ids"][5]
    first = whole["token_ids"].index(stop)
    (out,) = llm.generate([3, 1, 4], SamplingParams(max_tokens=40, stop_token_ids=[stop]))
    assert out["token_ids"] == whole["token_ids"][: first + 1]
    assert out["finish_reason"] == "stop"
    assert llm.tokenizer is not None
    assert out["text"] == llm.tokenizer.decode(out["token_ids"][:-1])


def test_log_probabilities(llm: LLM) -> None:
    (out,) = llm.generate("hello", SamplingParams(max_tokens=3, logprobs=2))
    assert [one["token_id"] for one in out["logprobs"]] == out["token_ids"]
    for one in out["logprobs"]:
        assert len(one["top_logprobs"]) == 2
        assert one["top_logprobs"][0] == (one["token_id"], one["logprob"])
    (chosen,) = llm.generate("hello", SamplingParams(max_tokens=1, logprobs=0))
    assert chosen["logprobs"][0]["top_logprobs"] == []


def test_a_seed_makes_an_answer_repeatable(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    alone = llm.generate("hello", params)[0]["token_ids"]
    crowd = llm.generate(["other"] * 5 + ["hello"], [GREEDY] * 5 + [params])[-1]["token_ids"]
    assert alone == crowd


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(talk, GREEDY)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "yes"}]], GREEDY)
    assert one["token_ids"] == two[0]["token_ids"] and len(two) == 2
    assert llm.tokenizer is not None
    rendered = llm.tokenizer.apply_chat(talk)
    assert one["prompt_tokens"] == len(rendered)
    assert one["token_ids"] == llm.generate(rendered, GREEDY)[0]["token_ids"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert llm.chat(parts, GREEDY) == llm.chat(talk, GREEDY)
    longer = llm.chat([*talk, {"role": "assistant", "content": None}], GREEDY)
    left_open = {"add_generation_prompt": False}
    bare = llm.chat(talk, GREEDY, chat_template_kwargs=left_open)
    assert bare[0]["prompt_tokens"] < one["prompt_tokens"] < longer[0]["prompt_tokens"]
    with pytest.raises(ValueError, match="messages"):
        llm.chat([{"role": "user"}], GREEDY)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, progress=True)
    assert "requests: 100%" in capsys.readouterr().err
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""


def test_a_failure_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the middle: the next call works and finds all pages at home."""
    turns = iter(range(3))
    original = llm.scheduler.step_overlap

    def turn(block: bool = False) -> None:
        if next(turns, None) is None:
            raise KeyboardInterrupt
        original(block)

    monkeypatch.setattr(llm.scheduler, "overlap", True)
    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "step_overlap", turn)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "there"], SamplingParams(max_tokens=50))
    assert not llm.scheduler.reqs
    check_integrity(llm.scheduler.cache)
    assert len(llm.generate("hello", GREEDY)[0]["token_ids"]) == 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["finish", "put_messages"])
def test_an_interrupted_reset_is_done_by_the_next_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool, place: str
) -> None:
    """A second Ctrl-C leaves requests behind; the next call drops them and answers its own."""
    monkeypatch.setattr(llm.scheduler, "overlap", overlap)
    (want,) = llm.generate("hello", GREEDY)
    target = llm.channel if place == "put_messages" else llm.scheduler
    original = getattr(target, place)

    def interrupted(*args: Any) -> None:
        if place == "put_messages":
            original(*args)
        raise KeyboardInterrupt

    def reset() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, place, interrupted)
        patch.setattr(llm.scheduler, "reset", reset)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "there"], SamplingParams(max_tokens=50))
    assert llm.scheduler.reqs or llm.channel.waiting
    assert llm.generate("hello", GREEDY)[0]["token_ids"] == want["token_ids"]
    assert not llm.scheduler.reqs
    check_integrity(llm.scheduler.cache)


def test_the_bar_counts_answers_and_not_steps(llm: LLM) -> None:
    """Work beside the engine grows with the tokens, not with tokens times prompts."""
    pushed = 0

    class Bar:
        def update(self, count: int) -> None:
            nonlocal pushed
            pushed += count

    params = SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = {uid: OutputBuilder(np.ones(2, np.int32), params, None) for uid in range(5)}
    llm.channel.put_messages(*(UserMsg(uid, [1, 2], params) for uid in outputs))
    llm.run_until_done(outputs, Bar())  # type: ignore[arg-type]
    assert pushed == 5 and all(output.done for output in outputs.values())


@pytest.mark.parametrize("launched", [False, True])
def test_an_interrupted_launch_harms_no_later_answer(
    folder: Path, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C around the launch of a captured step: pages are freed, the next answers are right."""

    class Interrupted:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def replay(self) -> None:
            calls.append(1)
            if len(calls) != 3 or launched:
                self.graph.replay()
            if len(calls) == 3:
                raise KeyboardInterrupt

    record_on_a_cpu(monkeypatch)
    calls: list[int] = []
    prompts, params = ["hello", "there", "you"], SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(folder, page_size=4, device="cpu", cuda_graph_bs=(2, 4), num_pages=64) as llm:
        want = [out["token_ids"] for out in llm.generate(prompts, params)]
        graph = llm.scheduler.engine.runners.decode
        assert graph is not None and graph.replays > 3
        plain = dict(graph.steps)
        for size, step in plain.items():
            graph.steps[size] = replace(step, graph=cast(Any, Interrupted(step.graph)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
        graph.steps.update(plain)
        assert not llm.scheduler.reqs
        check_integrity(llm.scheduler.cache)
        assert [out["token_ids"] for out in llm.generate(prompts, params)] == want


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama")
    with LLM(plain, device="cpu", dtype=torch.float32) as llm:
        (out,) = llm.generate([1, 2, 3], GREEDY)
        assert len(out["token_ids"]) > 0 and out["text"] == ""
        for call in (
            lambda: llm.generate("text", GREEDY),
            lambda: llm.generate([1], SamplingParams(stop="x")),
            lambda: llm.chat([{"role": "user", "content": "hi"}]),
        ):
            with pytest.raises(ValueError, match="has no tokenizer"):
                call()


def test_options_reach_the_engine(folder: Path) -> None:
    how: dict[str, Any] = {"cache_type": "naive", "max_extend_tokens": 9, "num_pages": 33}
    with LLM(str(folder), page_size=8, device=torch.device("cpu"), overlap=False, **how) as llm:
        engine, prefill = llm.scheduler.engine, llm.scheduler.prefill
        assert (engine.num_pages, engine.page_size, prefill.limits.max_extend_tokens) == (33, 8, 9)
        assert type(llm.scheduler.cache.prefix_cache).__name__ == "NaiveCache"
        assert len(llm.generate([1] * 40, GREEDY)[0]["token_ids"]) > 0
    with pytest.raises(ValueError, match="tensor_parallel_size: 2 beside tp 1"):
        LLM(folder, tensor_parallel_size=2, tp=1)
    with pytest.raises(ValueError, match="page_size: must be"):
        LLM(folder, page_size=-3)
    with pytest.raises(TypeError, match="'nonsense'; there are attention_backend, cache_type"):
        LLM(folder, nonsense=1)
    with pytest.raises(TypeError, match="'page_sise'; did you mean page_size"):
        LLM(folder, page_sise=4)


@pytest.mark.parametrize(("policy", "least"), [("fcfs", 2), ("fair", 1)])
def test_a_crowd_comes_in_by_groups(folder: Path, policy: str, least: int) -> None:
    """Two of 64 rows: no prefill step for a single prompt while others wait, unless it is fair."""
    sizes = {"page_size": 4, "max_running_req": 64, "num_pages": 2000}
    with LLM(folder, **sizes, schedule_policy=policy, device="cpu") as llm:
        params = [SamplingParams(max_tokens=4 + n, ignore_eos=True) for n in range(90)]
        with launches(llm.scheduler) as log:
            llm.generate([[n] for n in range(90)], params)
    prompts = [step.requests for step in log if step.phase is Phase.PREFILL]
    assert sum(prompts) == 90 and prompts[0] == 64 and min(prompts[1:-1]) == least


def test_the_package_is_lazy() -> None:
    code = "import sys, minisgl, minisgl.server.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert minisgl.__version__ and "LLM" in dir(minisgl)
    with pytest.raises(AttributeError, match="nothing"):
        _ = minisgl.nothing


def test_a_fork_is_told_that_it_has_no_threads(llm: LLM) -> None:
    """It would hang: a fork copies the memory and not the threads."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            llm.generate("hi")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read().startswith("this LLM was made in another process")
    os.waitpid(child, 0)


def test_threads_may_share_one_llm(llm: LLM) -> None:
    """Calls take turns: each gets its own answers, and no page is lost."""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    alone = [llm.generate([p], GREEDY)[0]["token_ids"] for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: llm.generate([p], GREEDY)[0]["token_ids"], prompts * 4))
    assert found == alone * 4
    check_integrity(llm.scheduler.cache)


@pytest.mark.parametrize("messages", ["hi", None, 5, [None], [{"role": "user", "content": "a"}, 5]])
def test_chat_says_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages"):
        llm.chat(messages)


def test_parameters_of_another_kind(llm: LLM) -> None:
    for wrong in (5, {"max_tokens": 5}, [5], "greedy"):
        with pytest.raises(ValueError, match="sampling_params: must be SamplingParams or a list"):
            llm.generate(["hi"], wrong)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"device: .*no GPU"):
        LLM(folder, device="cuda")


@pytest.mark.filterwarnings("error")
def test_draws_without_a_seed_differ_between_engines_unless_their_seed_is_fixed(
    folder: Path,
) -> None:
    params, texts = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True), []
    for fixed in (dict[str, Any](), {}, {"seed": 3}, {"seed": 3}):
        with LLM(folder, device="cpu", num_pages=64, **fixed) as llm:
            texts.append([out["token_ids"] for out in llm.generate([[5, 6]] * 2, params)])
    assert texts[0] != texts[1] and texts[2] == texts[3]
    assert all(one != other for one, other in texts)  # nor do two requests draw alike


def test_any_temperature_above_a_million_is_flat(llm: LLM) -> None:
    answers = [
        llm.generate([[5, 6]], SamplingParams(temperature=t, seed=1, max_tokens=6))[0]["token_ids"]
        for t in (1e6, 1e300)
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


@pytest.mark.parametrize("overlap", [None, False, True])
def test_a_cpu_overlaps_only_when_told(overlap: bool | None) -> None:
    """There the host is the device: a step launched early is a token delivered late."""
    with LLM(device="cpu", num_pages=64, overlap=overlap) as llm:
        assert llm.scheduler.overlap is bool(overlap)


def test_shutdown_gives_the_memory_back_although_the_scheduler_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(device="cpu", num_pages=64)
    buffer = llm.scheduler.engine.pool.buffer.fill_(1)
    monkeypatch.setattr(llm.scheduler, "run", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        llm.shutdown()
    assert not buffer.any()  # what the system took back reads as zeros


def test_shutdown_gives_the_memory_back() -> None:
    """At once, although others may still hold the object; a later use raises an error."""
    with LLM(device="cpu", num_pages=64) as llm:
        pool = llm.scheduler.engine.pool
        pool.buffer.fill_(1)
    assert not pool.buffer.any()
    llm.shutdown()  # twice is once
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("hello")


# Log probabilities of prompts


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_logprobs(reference: Any, ids: list[int]) -> torch.Tensor:
    """All log probabilities after each prefix of the prompt but the whole, [n - 1, vocab]."""
    return reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("fields", [{}, {"overlap": True}, {"max_extend_tokens": 7}])
def test_prompt_logprobs_are_those_of_transformers(
    folder: Path, reference: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is cached, cut into chunks, or beside them; few rows through the head at once."""
    monkeypatch.setattr("minisgl.engine.prompt_logprobs.LOGITS_AT_ONCE", 1000)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 100, 20).tolist()
    prompts = [shared + rng.integers(3, 100, n).tolist() for n in (1, 13, 5)] + [[7], shared]
    asked = SamplingParams(max_tokens=3, prompt_logprobs=2, temperature=1.0, top_k=3, seed=1)
    free = SamplingParams(max_tokens=3)
    with LLM(folder, device="cpu", page_size=4, num_pages=200, **fields) as llm:
        alone = llm.generate(shared, free)[0]  # now it is cached
        outs = llm.generate([*prompts, shared], [asked] * len(prompts) + [free])
        assert llm.scheduler.engine.scorer.rows < 20
    assert outs[-1]["token_ids"] == alone["token_ids"] and "prompt_logprobs" not in outs[-1]
    for ids, out in zip(prompts, outs):
        told = out["prompt_logprobs"]
        assert [entry["token_id"] for entry in told] == ids and out["cached_tokens"] == 0
        assert told[0]["logprob"] is None and len(out["token_ids"]) == 3
        if len(ids) == 1:
            continue
        rows = expected_logprobs(reference, ids)
        for entry, row in zip(told[1:], rows, strict=True):
            assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=2e-4)
            best = row.topk(2)
            assert [v for _, v in entry["top_logprobs"]] == pytest.approx(
                best.values.tolist(), abs=2e-4
            )


def test_scores_become_objects_only_where_they_are_read() -> None:
    """The step that sends them costs all others the time, for any length of the prompt."""
    length, params = 20_000, SamplingParams(max_tokens=1, prompt_logprobs=20)
    req = Req(uid=1, input_ids=np.arange(length), sampling_params=params, max_new_tokens=1)
    parts = (12_000, length - 12_001)
    req.scores = [torch.full((part, 42), 10**6, dtype=torch.int32) for part in parts]
    req.append(5)
    tracemalloc.start()
    reply = token_reply(req, "length", SampledTokens([5]), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reply.prompt_logprobs is not None and not req.scores
    assert peak < 3 * len(reply.prompt_logprobs.rows), "an object of a number takes ten times that"
    assert len(reply.prompt_logprobs.part()) == length
    assert [len(top) for *_, top in reply.prompt_logprobs.part(11_999, 12_002)] == [20] * 3


def test_scores_alone_cost_no_token(folder: Path) -> None:
    with LLM(folder, device="cpu", page_size=4, num_pages=100) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (out,) = llm.generate([[5, 6, 7]], params)
        assert (out["token_ids"], out["text"], out["finish_reason"]) == ([], "", "length")
        assert len(out["prompt_logprobs"]) == 3
        assert out["prompt_logprobs"][1]["top_logprobs"] == []
    with pytest.raises(ValueError, match="max_tokens: must be a positive integer without"):
        SamplingParams(max_tokens=0)


def test_many_scored_prompts_share_a_step(folder: Path) -> None:
    """They do not wait for one another's prefix, which they would not use."""
    prompts = [[9] * 40 + [uid] for uid in range(10, 15)]
    with LLM(folder, device="cpu", page_size=4, num_pages=200) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert llm.scheduler.step_count == 1


def test_retracted_scores_are_whole(folder: Path, reference: Any) -> None:
    """A half-scored prompt that gives its pages back begins again."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 100, n).tolist() for n in (20, 30, 40, 25)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
    params += [SamplingParams(max_tokens=20, prompt_logprobs=0, ignore_eos=True)] * 2
    with LLM(
        folder, device="cpu", page_size=4, num_pages=30, max_extend_tokens=8, reserve_tokens=1
    ) as llm:
        outs = llm.generate(prompts, params)
        assert llm.scheduler.retractions > 0
    for ids, out in list(zip(prompts, outs))[2:]:
        rows = expected_logprobs(reference, ids)
        told = [entry["logprob"] for entry in out["prompt_logprobs"][1:]]
        wanted = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert told == pytest.approx(wanted, abs=2e-4)
