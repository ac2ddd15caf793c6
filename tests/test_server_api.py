"""Every line of the OpenAI contract over a real socket, with the openai client where it can."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request
from httpx_sse._decoders import SSEDecoder, SSELineDecoder
from transformers import PreTrainedTokenizerBase

from minisgl import LLM
from minisgl.config.paths import resolve_model_path
from minisgl.core import GRAMMARS, SamplingParams
from minisgl.scheduler.messages import TokenReply, UserMsg
from minisgl.server.cli import ServerObservers, build_app
from minisgl.server.frontend import Frontend
from minisgl.server.http.access import Access, client_of
from minisgl.server.http.api import create_app
from minisgl.server.http.fields import CHANGES, HARMLESS, RESERVED
from minisgl.server.http.formats import sse
from minisgl.server.http.limits import ConcurrencyLimiter
from minisgl.server.http.schemas import ChatRequest, CompletionRequest, fair_client
from minisgl.server.http.settings import ApiSettings
from minisgl.server.options import Operations
from minisgl.server.workers.channels import LocalQueue
from minisgl.server.workers.messages import TokenizeMsg
from minisgl.server.workers.text_process import build_text_worker
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import Tokenizer
from minisgl.tokenizer_files import ChatTemplates
from tests import bodies
from tests.checkpoints import make_checkpoint
from tests.serving import WINDOW, Live, metric, random_model
from tests.test_tokenizer import byte_fallback, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[Live]:
    with Live(checkpoint, operations=Operations(log_format="none", max_body_size=200_000)) as live:
        yield live


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0)


def complete(live: Live, **fields: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=300)


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(event) for event in events[:-1]]


# Log probabilities


def test_completion_logprobs_are_those_of_the_engine(live: Live, checkpoint: Path) -> None:
    choice = complete(live, logprobs=3).json()["choices"][0]
    with LLM(checkpoint, num_pages=64) as llm:
        params = SamplingParams(max_tokens=8, logprobs=3)
        expected = llm.generate("hello", params)[0]
    found = choice["logprobs"]
    assert choice["text"] == expected["text"]
    assert found["token_logprobs"] == pytest.approx(
        [entry["logprob"] for entry in expected["logprobs"]], abs=1e-4
    )
    lengths = {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    assert lengths == {8} and all(len(top) <= 3 for top in found["top_logprobs"])
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert top[token] == value == max(top.values())  # greedy


def test_chat_logprobs_with_the_sdk(client: openai.OpenAI, live: Live) -> None:
    name = client.models.list().data[0].id
    ask = {"model": name, "messages": [{"role": "user", "content": "hi"}], "seed": 3}
    whole = client.chat.completions.create(**ask, max_tokens=6, logprobs=True, top_logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2 and entry.bytes is not None and entry.logprob <= 0
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert data.decode(errors="replace") == whole.choices[0].message.content
    stream = client.chat.completions.create(
        **ask, max_tokens=6, logprobs=True, top_logprobs=2, stream=True
    )
    pieces = [
        entry
        for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [(e.token, e.bytes) for e in pieces] == [(e.token, e.bytes) for e in logprobs.content]
    values = [entry.logprob for entry in logprobs.content]
    assert [entry.logprob for entry in pieces] == pytest.approx(values, abs=1e-4)
    bare = client.chat.completions.create(**ask, max_tokens=2, logprobs=True)
    assert bare.choices[0].logprobs.content[0].top_logprobs == []
    assert client.chat.completions.create(**ask, max_tokens=2).choices[0].logprobs is None


def test_text_offsets_find_their_tokens(live: Live) -> None:
    choice = complete(live, logprobs=0, max_tokens=40, temperature=1, seed=1).json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    assert all(top == {} for top in found["top_logprobs"])
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0
    for token, offset in zip(found["tokens"], found["text_offset"]):
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": "x"}, "logprobs"),
    ],
)
def test_bad_logprobs_are_named(live: Live, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = httpx.post(f"{live.url}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and param in error["message"]
    response = complete(live, logprobs=21)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logprobs"


def worker_run(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], finished: bool
) -> tuple[str, list[Any]]:
    """Text and entries that a client gets for these tokens."""
    out = LocalQueue()
    worker = build_text_worker(tokenizer, LocalQueue(), out, WINDOW)
    for position, token in enumerate(ids):
        last = finished and position == len(ids) - 1
        worker.handle(
            TokenReply(uid=0, token=token, stop=stop, logprob=-1.0, finished=last, top_logprobs=[])
        )
    worker.flush()
    replies = out.get_all(0.0)
    return "".join(r.text for r in replies), [entry for r in replies for entry in r.logprobs]


def test_no_logprob_tells_a_part_of_a_stop_string(checkpoint: Path) -> None:
    """Entries come in order, each after its text; none shows text that was cut."""
    tokenizer = Tokenizer(checkpoint)
    for text, stop in [
        ("go on STOP never", "STOP"),
        ("say 🙂 and 日本 STOP", "日本"),
        ("say 🙂 and", "🙂"),
        ("aaab", "ab"),
        ("no stop at all 🙂", "zzz"),
    ]:
        ids = tokenizer.encode(text, add_special_tokens=False).tolist()
        shown, entries = worker_run(tokenizer, ids, (stop,), finished=True)
        data = b"".join(entry.data for entry in entries)
        assert shown == text.split(stop)[0]
        assert shown.encode().startswith(data)
        if stop not in text:
            assert data.decode() == text


def test_bytes_of_tokens_spell_their_text(checkpoint: Path) -> None:
    for tokenizer in (Tokenizer(checkpoint), Tokenizer(resolve_model_path(None))):
        spell = TokenBytes(tokenizer)
        rng = random.Random(0)
        special = set(spell._added)
        plain = [token for token in range(tokenizer.vocab_size) if token not in special]
        for _ in range(50):
            ids = rng.choices(plain, k=20)
            data = b"".join(spell(token) for token in ids)
            assert data.decode(errors="replace") == tokenizer.decode(ids)
        assert spell(10**6) == b""


# The same text as offline


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of SentencePiece's kind, whose words begin with their space."""
    backend = byte_fallback()
    folder = make_checkpoint(
        tmp_path_factory.mktemp("pieces"),
        vocab_size=backend.get_vocab_size(),
        eos_token_id=backend.token_to_id("</s>"),
        max_position_embeddings=WINDOW,
    )
    return save(folder, backend)


def test_sentencepiece_texts_are_those_of_the_engine(pieces: Path) -> None:
    """A first word keeps the space before it; characters of several tokens; whole and streamed."""
    fields = [{"max_tokens": 20, "temperature": 1.0, "seed": seed} for seed in range(200)]
    with LLM(pieces, num_pages=64) as llm:
        found = llm.generate(["hello 世界"] * 200, [SamplingParams(**each) for each in fields])
    texts = [out["text"] for out in found]
    seeds = [seed for seed, text in enumerate(texts) if text.startswith(" ")][:2]
    seeds += [seed for seed, text in enumerate(texts) if "\ufffd" in text][:2]
    assert len(seeds) == 4
    with Live(pieces) as live:
        for seed in seeds:
            ask = {"prompt": "hello 世界", **fields[seed]}
            whole = complete(live, **ask).json()
            assert whole["choices"][0]["text"] == texts[seed]
            assert whole["usage"]["prompt_tokens"] == found[seed]["prompt_tokens"]
            chunks = chunks_of(complete(live, **ask, stream=True))
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts[seed]


@pytest.mark.parametrize("kind", ["checkpoint", "pieces"])
def test_stop_token_ids_end_both_alike(request: pytest.FixtureRequest, kind: str) -> None:
    """The token that ends an answer is counted, and is neither in its text nor in its logprobs."""
    folder: Path = request.getfixturevalue(kind)
    with LLM(folder, num_pages=64) as llm:
        free = llm.generate("hello", SamplingParams(max_tokens=12, ignore_eos=True))[0]
        stop = [free["token_ids"][5]]
        params = SamplingParams(max_tokens=12, stop_token_ids=stop)
        out = llm.generate("hello", params)[0]
    assert out["finish_reason"] == "stop" and out["text"] != free["text"]
    with Live(folder) as live:
        for stream in (False, True):
            fields = {"max_tokens": 12, "stop_token_ids": stop, "stream": stream, "logprobs": 0}
            response = complete(live, **fields)
            parts = chunks_of(response) if stream else [response.json()]
            choices = [part["choices"][0] for part in parts]
            assert "".join(choice["text"] for choice in choices) == out["text"]
            assert choices[-1]["finish_reason"] == "stop"
            tokens = [t for choice in choices for t in (choice["logprobs"] or {}).get("tokens", [])]
            assert len(tokens) == len(out["token_ids"]) - 1
        usage = complete(live, max_tokens=12, stop_token_ids=stop).json()["usage"]
    assert usage["completion_tokens"] == len(out["token_ids"])


# Whose a request is


@pytest.mark.parametrize(
    ("fields", "client"),
    [
        ({}, "address 127.0.0.1"),
        ({"user": None}, "address 127.0.0.1"),
        ({"user": ""}, "address 127.0.0.1"),
        ({"user": "address 10.0.0.7"}, "address 127.0.0.1"),  # without a key, no name counts
        ({"user": "日本"}, "address 127.0.0.1"),
    ],
)
def test_scheduler_learns_whose_a_request_is(
    live: Live, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], client: str
) -> None:
    box = live.server.to_scheduler
    put, seen = box.put, list[str]()

    def noted(*messages: Any) -> None:
        seen.extend(msg.client for msg in messages if isinstance(msg, UserMsg))
        put(*messages)

    monkeypatch.setattr(box, "put", noted)
    body = {"max_tokens": 1, **fields}
    chat = {**body, "messages": [{"role": "user", "content": "x"}]}
    routes = {
        "/v1/completions": {**body, "prompt": ["a", "b"], "n": 2, "temperature": 1},
        "/v1/chat/completions": chat,
        "/generate": {**body, "prompt": "a"},
    }
    for path, content in routes.items():
        assert httpx.post(f"{live.url}{path}", json=content, timeout=300).status_code == 200
    assert seen == [client] * 6


@pytest.mark.parametrize(
    ("key", "user", "client"),
    [
        ("sk-1", "ann", "key alice"),
        ("sk-1", None, "key alice"),
        ("sk-0", "ann", "user ann"),
        ("sk-0", None, "address 10.0.0.1"),
        ("sk-0", "key alice", "user key alice"),
        (None, "ann", "address 10.0.0.1"),
        (None, None, "address 10.0.0.1"),
    ],
)
def test_a_named_key_or_address_is_the_client_whatever_user_it_names(
    key: str | None, user: str | None, client: str
) -> None:
    """Else a thousand made-up users would have a thousand shares; None: a server without a key."""
    headers = [(b"authorization", f"Bearer {key}".encode())]
    request = Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 5)})
    asyncio.run(Access({"": "sk-0", "alice": "sk-1"} if key else {}).check(request))
    body = CompletionRequest(prompt="a", user=user)
    assert fair_client(client_of(request), body, key is not None) == client


def test_users_are_short_strings(live: Live) -> None:
    for user in (5, ["x"], "x" * 1025):
        error = complete(live, user=user).json()["error"]
        assert error["param"] == "user", error


# Choices, seeds, prompts


def test_choices_with_one_seed_differ_and_come_again(live: Live) -> None:
    def texts(**fields: Any) -> list[str]:
        reply = complete(live, n=4, temperature=1, max_tokens=12, **fields).json()
        return [choice["text"] for choice in reply["choices"]]

    first = texts(seed=5)
    assert len(set(first)) == 4 and texts(seed=5) == first
    assert texts(seed=6) != first and complete(live, seed=2**63 - 1, n=2).status_code == 200
    streamed = ["", "", "", ""]
    for chunk in chunks_of(complete(live, n=4, temperature=1, max_tokens=12, seed=5, stream=True)):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == first
    live.assert_pages_home()


def test_token_ids_and_text_are_one_prompt(live: Live, checkpoint: Path) -> None:
    ids = Tokenizer(checkpoint).encode("hello").tolist()
    both = complete(live, prompt=[ids, ids], logprobs=1).json()
    assert both["choices"][0]["text"] == both["choices"][1]["text"]
    assert both["choices"][0]["text"] == complete(live).json()["choices"][0]["text"]
    assert both["usage"]["prompt_tokens"] == 2 * len(ids)
    chunks = chunks_of(
        complete(live, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    )
    assert {c["choices"][0]["index"] for c in chunks[:-1]} == {0, 1, 2, 3}
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * 8


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leak(live: Live, stream: bool) -> None:
    """Every piece of a greedy answer as a stop string: the text ends right before it."""
    free = complete(live, max_tokens=30).json()["choices"][0]["text"]
    for start in range(2, len(free) - 3, 4):
        stop = free[start : start + 3]
        response = complete(live, max_tokens=30, stop=[stop, "never there"], stream=stream)
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(response)]
            text, reason = "".join(c["text"] for c in choices), choices[-1]["finish_reason"]
        else:
            choice = response.json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        assert (text, reason) == (free[: free.index(stop)], "stop")
    live.assert_pages_home()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 513, "n": 2}, "prompt"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("1e400")}, "timeout"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": ["ok", ""]}, "bad_words"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"stop_regex": "a+"}, "stop_regex"),
    ],
)
def test_what_is_too_much_or_unknown_is_named(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    content = json.dumps({"prompt": "x", **fields})
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{live.url}/v1/completions", content=content, headers=headers)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert param in error["message"]


def test_harmless_values_pass(live: Live) -> None:
    fields = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "best_of": 2,
        "n": 2,
        "echo": False,
        "suffix": "",
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
        "guided_json": None,
        "guided_regex": "",
        "a_field_of_next_year": 3,
    }
    assert complete(live, **fields).status_code == 200


def test_sampling_controls_reach_the_engine(live: Live, client: openai.OpenAI) -> None:
    """Each field by what it does to a greedy answer, with the fields' names in JSON."""

    def tokens(**fields: Any) -> list[int]:
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{live.url}/v1/completions", json=body | fields | {"logprobs": 0})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["tokens"]

    free = tokens()
    assert set(tokens(allowed_token_ids=[40])) == set(tokens(logit_bias={"40": 100.0}))
    assert len(set(tokens(allowed_token_ids=[40]))) == 1
    few = {"allowed_token_ids": [40, 41, 42, 43]}
    (first, *_) = few_tokens = tokens(**few)
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert len(set(tokens(**few, **{penalty: 2.0}))) > len(set(few_tokens))
    assert first not in tokens(**few, bad_words=[first])
    assert tokens(**few, repetition_penalty=100) != few_tokens
    hot = {"temperature": 5.0, "seed": 1}
    assert tokens(min_p=1.0, **hot) == free != tokens(**hot)
    name = client.models.list().data[0].id
    ask = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    answer = client.chat.completions.create(**ask, logit_bias={"40": 100}, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len({entry.token for entry in logprobs.content}) == 1


def test_a_mass_of_messages_is_refused_at_once(live: Live, checkpoint: Path) -> None:
    message = {"role": "user", "content": ""}
    out = LocalQueue()
    worker = build_text_worker(Tokenizer(checkpoint), LocalQueue(), out, WINDOW)
    worker.handle(
        TokenizeMsg(uid=1, sampling_params=SamplingParams(), messages=[message] * (WINDOW + 1))
    )
    worker.flush()
    (error,) = out.get_all(0.0)
    assert error.code == "context_length_exceeded" and error.param == "messages"
    with Live(checkpoint, operations=Operations(log_format="none", max_body_size=2**24)) as large:
        response = httpx.post(
            f"{large.url}/v1/chat/completions", json={"messages": [message] * 200_000}, timeout=300
        )
    assert response.status_code == 413 and "lists and objects" in response.text


# Fields: each is honoured, refused by name, or cannot change the answer

VLLM = """
messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens
n presence_penalty response_format seed stop stream stream_options temperature top_p tools
tool_choice reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id
session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval prompt_embeds
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern
"""
SGLANG = """
best_of suffix return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_token_ids json_schema regex ebnf stop_regex no_stop_trim
lora_path session_id session_params custom_params custom_logit_processor images_config
bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank
data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority custom_labels
separate_reasoning stream_reasoning chat_template_kwargs input_ids min_new_tokens max_new_tokens
sampling_params structural_tag max_dynamic_patch min_dynamic_patch return_meta_info
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_input_ids_in_sglext
return_output_ids_in_sglext return_prompt_token_ids return_sampling_mask return_spec_tokens_details
sampling_logprobs_mode task thinking use_audio_in_video video_config watermark
"""
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def chat(live: Live, **fields: Any) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/chat/completions", json={**CHAT, **fields}, timeout=300)


def test_tenants_with_a_salt_share_no_prefix(live: Live) -> None:
    long = {"messages": [{"role": "user", "content": "What is 12 + 3? " * 4}]}
    found = []
    for salt, key in (
        ("red", None), ("blue", None), ("red", None), (None, None),
        ("red", "blue"), ("red", "green"), ("red", "blue"), (None, "green"), (None, "blue"),
    ):  # fmt: skip
        answer = chat(live, **long, cache_salt=salt, extra_key=key)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert [count > 0 for count in found] == [0, 0, 1, 0, 0, 0, 1, 0, 1]
    for name in ("cache_salt", "extra_key"):
        assert chat(live, **{name: ""}).json()["error"]["param"] == name


def test_every_known_field_is_in_a_table() -> None:
    from openai.types import completion_create_params as plain
    from openai.types.chat import completion_create_params as chats

    known = set(f"{VLLM} {SGLANG}".split())
    for params in (plain.CompletionCreateParamsBase, chats.CompletionCreateParamsBase):
        known |= set(params.__annotations__)
    honoured = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHANGES, *GRAMMARS}
    assert known - honoured - set(HARMLESS) == set()
    assert not honoured & set(HARMLESS)


ANY_VALUE = {"eos_token_id"}  # may be one or a list


def test_fields_are_treated_as_the_table_says(live: Live) -> None:
    """One client, one connection: rejected fields are named, neutral values pass."""
    odd = [{"something": "odd"}]
    with httpx.Client(base_url=live.url, timeout=300) as client:
        for path, body, schema in [
            ("/v1/chat/completions", CHAT, ChatRequest),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 1}, CompletionRequest),
        ]:

            def answer(**fields: Any) -> httpx.Response:
                return client.post(path, json={**body, **fields})  # noqa: B023

            passing = {n: (values or [odd])[0] for n, values in HARMLESS.items() if values != ()}
            response = answer(**passing, a_field_of_next_year=odd)
            assert response.status_code == 200, response.text
            wrong = {name for name, values in HARMLESS.items() if values is not None}
            wrong |= {*schema.model_fields, *CHANGES} - {"renamed", *ANY_VALUE}
            wrong -= set() if schema is ChatRequest else {"reasoning_effort", "think"}
            for name in sorted(wrong):
                response = answer(**{name: odd})
                assert response.status_code == 400, name
                error = response.json()["error"]
                assert error["param"] == name and error["message"].startswith(name), error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "y" * 5000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": 2**70}}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_chat_fields_are_refused_by_name(live: Live, fields: dict[str, Any], param: str) -> None:
    response = chat(live, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and param in error["message"]


def test_template_arguments_are_reserved() -> None:
    theirs = PreTrainedTokenizerBase.apply_chat_template
    for function in (theirs, ChatTemplates.render):
        names = set(inspect.signature(function).parameters)
        assert names - {"self", "kwargs", "variables", "add_generation_prompt"} <= set(
            RESERVED.split()
        )


def test_template_variables_reach_the_template(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the template makes of them: the prompt's text, and its length in the usage."""
    seen = list[dict[str, Any]]()
    whole = Tokenizer.render_chat

    def noted(self: Tokenizer, messages: Any, **variables: Any) -> str:
        seen.append(variables)
        return whole(self, messages, **variables)

    monkeypatch.setattr(Tokenizer, "render_chat", noted)
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat(live, **thinking, reasoning_effort="low").status_code == 200
    assert seen == [{"enable_thinking": False, "reasoning_effort": "low"}]
    talk = [*CHAT["messages"], {"role": "assistant", "content": "so"}]
    tokens = [
        chat(live, messages=talk, **fields).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True})
    ]
    assert tokens[0] > tokens[1] > tokens[2]
    assert seen[-1] == {"continue_final_message": True}


def test_defaults_of_completions_and_of_logprobs(live: Live) -> None:
    body = {"prompt": [5], "ignore_eos": True}
    usage = httpx.post(f"{live.url}/v1/completions", json=body).json()["usage"]
    assert usage["completion_tokens"] == 16
    for value, told in ((False, False), (0, True)):
        choice = complete(live, logprobs=value, max_tokens=1).json()["choices"][0]
        assert (choice["logprobs"] is not None) is told
    assert chat(live, logprobs=False, top_logprobs=0).status_code == 200


# Routes


def test_routes_that_are_missing_say_which_exist(live: Live) -> None:
    for path in ("embeddings", "rerank"):
        response = httpx.post(f"{live.url}/v1/{path}", json={})
        message = response.json()["error"]["message"]
        assert response.status_code == 404 and message.startswith(f"/v1/{path}: ")
        assert "/v1/chat/completions" in message and "/v1/models" in message


def test_probes_and_lists(live: Live) -> None:
    assert httpx.get(f"{live.url}/v1/models/").json()["object"] == "list"
    health = httpx.head(f"{live.url}/health")
    assert health.status_code == 200 and health.content == b""


def test_key_comes_before_the_body() -> None:
    app = create_app(Frontend([LocalQueue()], LocalQueue()), ApiSettings("m", 9, api_key="clé"))

    async def ask(**headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            about = {"content-type": "application/json"} | headers
            sent = {name: value.encode() for name, value in about.items()}
            return await client.post("/v1/completions", content=b"{not JSON", headers=sent)

    refused = asyncio.run(ask(authorization="Bearer wrong"))
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert asyncio.run(ask()).status_code == 401
    for scheme in ("bearer", "BEARER"):
        assert asyncio.run(ask(authorization=f"{scheme} clé")).status_code == 400


@pytest.mark.parametrize("for_all", [False, True])
def test_the_key_for_what_operators_read(for_all: bool) -> None:
    operations = Operations(log_format="none", key_for_all=for_all)
    frontend, observers = Frontend([LocalQueue()], LocalQueue()), ServerObservers(operations)
    settings = ApiSettings("m", 9, api_key="key")
    app = build_app(frontend, settings, ConcurrencyLimiter(), observers, operations)

    async def statuses(path: str) -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            given = [{}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer key"}]
            return [(await client.get(path, headers=headers)).status_code for headers in given]

    for path in ("/metrics", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"):
        assert asyncio.run(statuses(path)) == [401 if for_all else 200] * 2 + [200], path
    assert asyncio.run(statuses("/health")) == [200] * 3
    assert asyncio.run(statuses("/v1/models")) == [401, 401, 200]


def test_a_drain_ends_before_kubernetes_kills() -> None:
    """30 s from SIGTERM to SIGKILL; closing, asking, terminating and killing take 10 at most."""
    assert Operations().drain_timeout + 2 + 5 + 1 + 2 < 30


def test_late_answers_are_not_asked_for_again(live: Live) -> None:
    late = complete(live, timeout=0.001, max_tokens=200, ignore_eos=True)
    assert late.status_code == 408 and late.headers["x-should-retry"] == "false"


def test_refusals_are_counted_by_status(checkpoint: Path) -> None:
    operations = Operations(log_format="none", max_body_size=1000)
    with Live(checkpoint, operations=operations, limit=1) as live:
        complete(live, top_p=7)
        complete(live, model="other")
        httpx.get(f"{live.url}/nowhere")
        complete(live, prompt="x" * 2000)
        live.limiter.taken = 1
        complete(live)
        live.limiter.taken, live.limiter.reason = 0, "closed"
        complete(live)
        live.limiter.reason = None
        counts = {400: 1, 404: 2, 413: 1, 429: 1, 503: 1}
        for code, count in counts.items():
            assert metric(live.url, f'refusals_total{{code="{code}"}}') == count, code


def test_openapi_says_what_is_sent(live: Live) -> None:
    paths = httpx.get(f"{live.url}/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        about = paths["paths"][path]["post"]
        assert set(about["responses"]) == {"200", "4XX", "5XX"} and about["security"]
        assert "text/event-stream" in about["responses"]["200"]["content"]
    assert paths["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert "text/plain" in paths["paths"]["/metrics"]["get"]["responses"]["200"]["content"]


def test_models_and_unknown_names(client: openai.OpenAI, live: Live) -> None:
    name = client.models.list().data[0].id
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])


def test_generate_gives_bare_text(live: Live) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    text = complete(live).json()["choices"][0]["text"]
    whole = httpx.post(f"{live.url}/generate", json={**body, "stream": False}).json()
    assert whole == {"text": text}
    stream = httpx.post(f"{live.url}/generate", json=body)
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = stream.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    joined = ["\n".join(line[6:] for line in event.split("\n")) for event in events[:-2]]
    assert "".join(joined) == text
    ids = httpx.post(f"{live.url}/generate", json={"prompt": [5, 6], "max_tokens": 2})
    assert ids.status_code == 200
    for bad in ({}, {"prompt": []}, {"prompt": "x", "n": 2}, {"prompt": "x", "max_tokens": 0}):
        assert httpx.post(f"{live.url}/generate", json=bad).status_code == 400
    live.assert_pages_home()


def test_every_line_end_is_a_line_end() -> None:
    """CR ends a line of an event stream as LF does: a reader must not lose what follows."""
    for text in ("a\rb", "a\nb", "a\r\nb", "\r", "a\u2028b"):
        data = f"{sse(text).decode()}{sse({'text': text}).decode()}"
        decoder = SSEDecoder()
        events = [e.data for line in SSELineDecoder().decode(data) if (e := decoder.decode(line))]
        assert events[0] == text.replace("\r\n", "\n").replace("\r", "\n")
        assert json.loads(events[1]) == {"text": text}


def test_browsers_may_ask_and_read_errors(live: Live) -> None:
    origin = {"origin": "http://example.org"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    allowed = httpx.options(f"{live.url}/v1/completions", headers={**origin, **asked})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"]
    for content in (b"{", b"x" * 300_000):
        response = httpx.post(f"{live.url}/v1/completions", headers=origin, content=content)
        assert response.status_code in (400, 413)
        assert response.headers["access-control-allow-origin"] == "*"


def test_body_that_is_too_large(live: Live) -> None:
    """By its header, and chunked without one; either way the rest is not read."""
    large = httpx.post(f"{live.url}/v1/completions", content=b" " * 200_001)
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100_000):
            sent += 1000
            yield b" " * 1000

    chunked = httpx.post(f"{live.url}/v1/completions", content=pieces(), timeout=300)
    for response in (large, chunked):
        error = response.json()["error"]
        assert response.status_code == 413 and error["code"] == "body_too_large"
        assert "200000" in error["message"]
    assert sent < 50_000_000
    fits = json.dumps({"prompt": "x", "max_tokens": 1}).ljust(200_000)
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{live.url}/v1/completions", content=fits, headers=headers)
    assert response.status_code == 200


def test_ids_and_headers(live: Live, checkpoint: Path) -> None:
    with Live(checkpoint, operations=Operations(log_prompts=True)) as logged:
        response = complete(logged)
        assert response.json()["id"] == "cmpl-" + response.headers["x-request-id"]
        missing = httpx.get(f"{logged.url}/nowhere")
        assert missing.headers["x-request-id"] and missing.json()["error"]["code"] == "http_404"
    stream = complete(live, stream=True)
    assert stream.headers["cache-control"] == "no-cache"


# The openai client, asynchronous


def test_async_client_with_many_streams(live: Live) -> None:
    async def one(client: openai.AsyncOpenAI, name: str, index: int) -> tuple[str, str]:
        ask: dict[str, Any] = {
            "model": name,
            "messages": [{"role": "user", "content": f"number {index}"}],
            "max_tokens": 10,
            "temperature": 0,
        }
        stream = await client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert usage is not None and usage.completion_tokens == 10
        whole = await client.chat.completions.create(**ask)
        return text, whole.choices[0].message.content or ""

    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
            name = (await client.models.list()).data[0].id
            return await asyncio.gather(*(one(client, name, index) for index in range(24)))

    assert all(streamed == whole for streamed, whole in asyncio.run(all_of_them()))
    live.assert_pages_home()


def test_sdk_raises_the_right_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt=[5] * (WINDOW + 1))
    assert caught.value.code == "context_length_exceeded" and str(WINDOW) in caught.value.message
    assert str(WINDOW + 1) in caught.value.message
    # LiteLLM, and what builds on it, recognises the error by these words.
    assert "is longer than the model's context length" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="", prompt="x", top_p=3)
    assert caught.value.param == "top_p" and caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, ""),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"ebnf": "root ::= ??"}, "ebnf"),
        ({"regex": "(("}, "regex"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice"),
    ],
)
def test_a_bad_grammar_is_named_as_it_was_sent(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    param = param or "response_format"
    for stream in (False, True):
        response = complete(live, stream=stream, **fields)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param, error
        assert error["message"].startswith(f"{param}:"), error


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("temperature", "0.5"), ("temperature", True), ("max_tokens", "8"), ("max_tokens", True),
        ("max_tokens", 8.0), ("top_p", "1"), ("seed", "1"), ("seed", 1.5), ("top_k", "5"),
        ("ignore_eos", "true"), ("ignore_eos", 1), ("min_p", "0"), ("logprobs", "1"),
        ("stop_token_ids", ["5"]), ("presence_penalty", "1"),
    ],
)  # fmt: skip
def test_types_are_those_of_llm(live: Live, field: str, wrong: Any) -> None:
    """No text is a number, neither in JSON nor in Python; an integer is a number in both."""
    error = complete(live, **{field: wrong}).json()["error"]
    assert error["param"] == field, error
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**{field: wrong})
    assert complete(live, temperature=1, min_p=0, logit_bias={"5": 1}).status_code == 200


def test_too_many_stop_strings_are_told_their_limit(live: Live) -> None:
    error = complete(live, stop=["x"] * 65).json()["error"]
    assert error["param"] == "stop" and "at most 64 items" in error["message"], error


# Echo


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_tells_the_prompt_first(
    live: Live, checkpoint: Path, max_tokens: int, stream: bool
) -> None:
    prompt, options = "hello wide 🙂 world", {"max_tokens": max_tokens, "logprobs": 2}
    tokenizer = Tokenizer(checkpoint)
    ids = tokenizer.encode(prompt).tolist()
    with LLM(checkpoint, num_pages=64) as llm:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2)
        expected = llm.generate(ids, params)[0]
    for given in (prompt, ids):
        response = complete(live, prompt=given, echo=True, stream=stream, **options)
        choices = [e["choices"][0] for e in chunks_of(response)] if stream else None
        choices = choices or response.json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices]
        told = {name: [x for part in parts for x in part[name]] for name in parts[0]}
        assert text == prompt + expected["text"]
        assert len(told["tokens"]) == len(ids) + max_tokens
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        ours = [entry["logprob"] for entry in expected["prompt_logprobs"][1:]]
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(ours, abs=1e-4)
        for name, offset in zip(told["tokens"], told["text_offset"]):
            assert "\ufffd" in name or text[offset:].startswith(name), (name, offset, text)
    assert choices[-1]["finish_reason"] == "length"


def test_an_echo_ends_with_the_token_that_was_not_wanted(live: Live, checkpoint: Path) -> None:
    """Harnesses cut the last entry off: an end token has one, too, though it is no text."""
    eos = Tokenizer(checkpoint).eos_token_ids[0]
    forced = complete(live, prompt=[5, 6, 7], echo=True, logprobs=0, allowed_token_ids=[eos])
    choice = forced.json()["choices"][0]
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["tokens"]) == 4
    bare = complete(live, prompt=[5, 6, 7], logprobs=0, allowed_token_ids=[eos]).json()
    assert bare["choices"][0]["logprobs"]["tokens"] == []


def test_echo_without_log_probabilities(live: Live) -> None:
    plain = complete(live, n=2).json()["choices"][0]["text"]
    reply = complete(live, n=2, echo=True).json()
    for choice in reply["choices"]:
        assert choice["text"] == "hello" + plain and choice["logprobs"] is None
    assert reply["usage"]["completion_tokens"] == 16
    assert complete(live, max_tokens=0).json()["error"]["param"] == "max_tokens"
    assert chat(live, echo=True).json()["error"]["param"] == "echo"
    live.assert_pages_home()


def test_scores_as_lm_eval_reads_them(live: Live) -> None:
    """Its request, and its arithmetic on the reply (lm_eval/models/openai_completions.py)."""
    context, continuation = [5, 6, 7, 8], [9, 10]
    body = {"prompt": [[*context, *continuation]] * 2, "temperature": 0, "max_tokens": 1}
    reply = complete(live, **body, logprobs=1, seed=1234, echo=True).json()
    for choice in reply["choices"]:
        told = choice["logprobs"]
        tokens = told["token_logprobs"][len(context) : -1]
        tops = told["top_logprobs"][len(context) : -1]
        assert len(tokens) == len(continuation) and all(x < 0 for x in tokens)
        assert all(value <= max(top.values()) + 1e-6 for value, top in zip(tokens, tops))


# Tools and schemas, mutated


def test_mutated_tools_and_schemas_are_answered(checkpoint: Path) -> None:
    """A share of `python -m tests.bodies`, which sends 10,000."""
    found = bodies.check(120, seed=1, path=checkpoint)
    assert sum(found.values()) == 120 and found[400] > 40 and found[200] > 3, found
