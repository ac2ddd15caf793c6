"""Messages, queues, text worker, frontend and the HTTP API."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from fastapi import Request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoTokenizer

from minisgl.config.engine import ServerConfig
from minisgl.core import SamplingParams
from minisgl.events import StageTimed
from minisgl.llm import OutputBuilder
from minisgl.scheduler.frames import with_seed
from minisgl.scheduler.messages import (
    AbortMsg,
    ErrorReply,
    ExitMsg,
    PromptScores,
    TokenReply,
    UserMsg,
    aborted,
)
from minisgl.scheduler.requests import PROMPT_TAIL
from minisgl.server.frontend import Frontend, Observer, RequestFailed
from minisgl.server.http.api import EventStream, cancel_on_disconnect, create_app
from minisgl.server.http.errors import ApiError
from minisgl.server.http.limits import DRAINING, LOADING, ConcurrencyLimiter
from minisgl.server.http.schemas import ChatRequest, CompletionRequest
from minisgl.server.http.settings import ApiSettings, sampling_defaults, settings_for
from minisgl.server.in_process import InProcessServer
from minisgl.server.workers.channels import LocalQueue, ZmqInbox, ZmqOutbox
from minisgl.server.workers.messages import (
    Converted,
    ConvertMsg,
    StatsMsg,
    TokenizeMsg,
    TokenLogprob,
    UserReply,
    decode,
    encode,
)
from minisgl.server.workers.prompt_threads import PromptThreads, encode_all
from minisgl.server.workers.scheduler_process import SchedulerChannel
from minisgl.server.workers.text_process import ExtraTokenizer, build_text_worker
from minisgl.server.workers.text_worker import PromptQueue, TextWorker, run_text_worker
from minisgl.tokenizer import SLICE, Tokenizer
from tests.serving import WINDOW, Live, random_model, wait_for
from tests.test_tokenizer import byte_fallback, byte_level, metaspace, save


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[Live]:
    with Live(checkpoint) as running:
        yield running


def chat(live: Live, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **fields}
    headers = {"content-type": "application/json"}
    content = json.dumps(body)  # in ASCII, so that half a character can be sent too
    return httpx.post(
        f"{live.url}/v1/chat/completions", content=content, headers=headers, timeout=300
    )


# Messages and queues


def test_codec_returns_what_it_was_given() -> None:
    params = SamplingParams(temperature=0.5, stop="END", seed=3, logprobs=2)
    messages = [
        TokenizeMsg(uid=1, sampling_params=params, messages=[{"role": "user", "content": "ä🙂"}]),
        UserMsg(uid=2, input_ids=[1, 2], sampling_params=params),
        AbortMsg(uid=3),
        ExitMsg(),
        TokenReply(uid=4, token=5, stop=("a",), top_logprobs=[(1, -0.5)]),
        ErrorReply(uid=5, message="no", param="prompt"),
        UserReply(
            uid=6,
            text="x",
            token_ids=[1],
            logprobs=[TokenLogprob("x", b"x", -0.1, 3, [("y", b"\xff", -2.0)])],
        ),
        StatsMsg(running=1, free_pages=7),
        StageTimed("launch", 1.0, 2.0, 3, 4, "decode"),
    ]
    assert decode(encode(messages)) == messages
    assert [decode(encode([m])) for m in messages] == [[m] for m in messages]


def test_messages_of_one_flush_travel_as_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    address = f"ipc://{tmp_path}/box"
    inbox, outbox = ZmqInbox(address), ZmqOutbox(address)
    frames: list[int] = []
    put = outbox.put
    outbox.put = lambda *ms: (frames.append(len(ms)), put(*ms))[1]  # type: ignore
    worker = TextWorker(tokenizer, LocalQueue(), outbox)
    worker.flush()
    for uid in range(5):
        worker.handle(TokenReply(uid=uid, token=1))
    worker.flush()
    worker.flush()
    got: list[Any] = []
    wait_for(lambda: bool(got.extend(inbox.get_all(0.1)) or len(got) == 5), "5 messages")
    assert frames == [5] and [m.uid for m in got] == list(range(5))
    inbox.close()
    outbox.close()


def test_a_text_worker_flushes_answers_before_it_encodes_a_prompt() -> None:
    done: list[str] = []

    class Idle(TextWorker):
        def __init__(self) -> None:
            self.later = {}

        def handle(self, msg: Any) -> None:
            done.append(type(msg).__name__)

        def encode(self, msg: Any) -> Any:
            done.append("encode")
            return UserMsg(msg.uid, [1], msg.sampling_params)

        def flush(self) -> None:
            done.append("flush")

    batch = [text_of(1, 10), TokenReply(uid=0, token=1), TokenReply(uid=2, token=1)]
    run_text_worker(Idle(), Feed(batch, [TokenReply(uid=0, token=2), ExitMsg()]))
    assert done == [
        "TokenReply", "TokenReply", "flush", "encode", "UserMsg", "flush", "TokenReply", "flush",
        "flush",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [{"type": "AbortMsg", "uid": "x"}, {"type": "Nothing"}, {"uid": 1}, [1, 2], None],
)
def test_codec_refuses_what_is_not_a_message(wrong: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(wrong))


def test_socket_keeps_order_and_waits_for_its_reader(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/box"
    outbox = ZmqOutbox(address)  # before the reader exists
    for uid in range(100):
        outbox.put(AbortMsg(uid=uid))
    inbox = ZmqInbox(address)
    got: list[Any] = []
    wait_for(lambda: bool(got.extend(inbox.get_all(0.1)) or len(got) == 100), "100 messages")
    assert [m.uid for m in got] == list(range(100))
    inbox.close()
    outbox.close()


def test_channel_leaves_when_its_parent_is_gone() -> None:
    channel = SchedulerChannel(LocalQueue(), LocalQueue(), alive=lambda: False)
    assert channel.recv(block=True) == [ExitMsg()]
    assert channel.recv(block=False) == []


class Feed:
    """An inbox that gives prepared batches without waiting, then nothing."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = list(batches)

    def get_all(self, timeout: float) -> list[Any]:
        return self.batches.pop(0) if self.batches else []


def test_every_turn_of_a_loop_is_a_beat() -> None:
    """While a loop waits and after each message: that is how a worker shows that it works on."""
    beats: list[None] = []
    lives = iter([True] * 5)
    channel = SchedulerChannel(
        Feed(), LocalQueue(), lambda: next(lives, False), lambda: beats.append(None)
    )
    assert channel.recv(block=True) == [ExitMsg()] and len(beats) == 6
    assert channel.recv(block=False) == [] and len(beats) == 7

    class Idle(TextWorker):
        def __init__(self) -> None:
            self.later = {}

        def handle(self, msg: Any) -> None:
            handled.append(len(beats))

        def flush(self) -> None:
            pass

    handled: list[int] = []
    beats.clear()
    tokens = [TokenReply(uid=0, token=1)] * 3
    run_text_worker(Idle(), Feed(tokens, [ExitMsg()]), lambda: beats.append(None))
    assert handled == [1, 2, 3] and len(beats) == 5


# Text worker


def text_of(uid: int, size: int) -> TokenizeMsg:
    return TokenizeMsg(uid=uid, text="x" * size, sampling_params=SamplingParams())


@given(st.lists(st.one_of(st.integers(2, 40), st.none(), st.just("leave")), max_size=60))
def test_short_prompts_go_first_in_bounds(events: list[int | str | None]) -> None:
    """Integers arrive with that size, None takes one out, "leave" drops one that waits."""
    queue, sizes, order = PromptQueue(), list[int](), list[int]()
    born: dict[int, int] = {}  # of each that waits: characters encoded before it came
    encoded = 0
    for event in [*events, *[None] * len(events)]:
        if isinstance(event, int):
            queue.add(text_of(len(sizes), event))
            born[len(sizes)] = encoded
            sizes.append(event)
        elif event == "leave":
            uid = next(iter(born), None)
            assert uid is None or queue.waiting.pop(uid)
            born.pop(uid, None)  # type: ignore[arg-type]
        else:
            found = queue.pop()
            assert bool(found) == bool(born) and len(found) < 2
            for msg in found:
                order.append(msg.uid)
                came, size = born.pop(msg.uid), sizes[msg.uid]
                encoded += size
                for uid, start in born.items():
                    # After as many characters as its own size, no newcomer overtakes it.
                    assert msg.uid < uid or came - start + size <= sizes[uid]
        assert len(queue.waiting) == len(born)
    assert len(order) == len(set(order))
    together = PromptQueue()  # of those that wait at one moment, the shortest is first
    for uid, size in enumerate(sizes):
        together.add(text_of(uid, size))
    found = together.pop()
    assert not found or sizes[found[0].uid] == min(sizes)


def answers(number: int, client: str = "", **fields: Any) -> list[TokenizeMsg]:
    """The messages of one request for so many answers; `fields` are parameters of sampling."""
    prompt, params = [300] * 10, SamplingParams(**fields)
    return [
        TokenizeMsg(
            uid=uid, input_ids=prompt, sampling_params=with_seed(params, uid), client=client
        )
        for uid in range(number)
    ]


@pytest.mark.parametrize("threads", [False, True])
def test_answers_to_one_request_go_to_the_scheduler_in_one_frame(
    tokenizer: Tokenizer, threads: bool
) -> None:
    """So that their prompt is sent once, and waits once for a scheduler that is busy."""
    frames = list[tuple[Any, ...]]()
    worker = TextWorker(tokenizer, SimpleNamespace(put=lambda *m: frames.append(m)), LocalQueue())
    prompts = PromptThreads() if threads else PromptQueue()

    class Waits(Feed):
        def get_all(self, timeout: float) -> list[Any]:
            wait([job.result for job in prompts._jobs.values()] if threads else [])
            return super().get_all(timeout)

    run_text_worker(worker, Waits(answers(16), [], [], [ExitMsg()]), prompts=prompts)
    assert [len(frame) for frame in frames] == [16]
    assert len({id(msg.input_ids) for msg in frames[0]}) == 1
    assert [msg.sampling_params.seed for msg in frames[0]] == list(range(16))


def test_prompts_come_out_once_for_each_answer_that_waits() -> None:
    queue = PromptQueue()
    first, equal = answers(3), answers(3)  # prompts that are equal, but not the same
    other = [replace(m, input_ids=first[0].input_ids) for m in answers(3, top_p=0.5)]
    requests = [first, other, equal]
    for number, request in enumerate(requests):
        for msg in request:
            queue.add(replace(msg, uid=10 * number + msg.uid))
    queue.add(text_of(99, 50))
    assert queue.drop(11)
    found = list[list[int]]()
    while queue.waiting:
        found.append([msg.uid for msg in queue.pop()])
    assert sorted(uid for uids in found for uid in uids) == [0, 1, 2, 10, 12, 20, 21, 22, 99]
    assert all(len({uid // 10 for uid in uids}) == 1 for uids in found)
    assert found[0] == [0, 1, 2] and [20, 21, 22] in found and queue._clocks == {}


def test_an_error_of_one_answer_is_the_error_of_all() -> None:
    asked = list[int]()

    def refuse(msg: TokenizeMsg) -> ErrorReply:
        asked.append(msg.uid)
        return ErrorReply(uid=msg.uid, message="no")

    made = encode_all(refuse, answers(4))
    assert asked == [0] and made == [(uid, ErrorReply(uid=uid, message="no")) for uid in range(4)]


def test_long_prompt_keeps_its_turn() -> None:
    """Short ones that come all the time overtake it until they have taken its own size."""
    queue, order = PromptQueue(), list[int]()
    queue.add(text_of(0, 100))
    for uid in range(1, 40):
        queue.add(text_of(uid, 10))
        found = queue.pop()
        order += [msg.uid for msg in found]
    assert order.index(0) in (9, 10) and order[0] == 1


def test_answers_go_before_prompts_and_leavers_are_dropped(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    first = [text_of(0, 50), text_of(1, 90), AbortMsg(uid=7), TokenReply(uid=8, token=5)]
    run_text_worker(bench.worker, Feed(first, [AbortMsg(uid=1), text_of(2, 9)], [], [ExitMsg()]))
    sent = bench.sent()
    assert [(type(m).__name__, m.uid) for m in sent] == [
        ("AbortMsg", 7), ("UserMsg", 0), ("UserMsg", 2)
    ]  # fmt: skip
    assert [reply.uid for reply in bench.replies()] == [8, 1]


def scored(uid: int, ids: list[int], top: int = 1, **fields: Any) -> TokenReply:
    """The first token of an answer, with the log probabilities of its prompt."""
    values = np.arange(len(ids), dtype=np.float32).repeat(1 + top).reshape(len(ids), 1 + top)
    named = np.repeat(np.array(ids, np.int32)[:, None], 1 + top, axis=1)
    rows = np.concatenate([named, (-values).view(np.int32)], axis=1)
    scores = PromptScores(1 + top, rows.tobytes())
    return TokenReply(
        uid=uid, token=5, logprob=-1.0, prompt_tokens=len(ids), prompt_logprobs=scores, **fields
    )


@pytest.mark.parametrize("length", [1, 255, 256, 257, 1287])
@pytest.mark.parametrize("top", [0, 3])
def test_a_scored_prompt_is_sent_in_pieces_and_whole(
    tokenizer: Tokenizer, length: int, top: int
) -> None:
    text = "hello wide 🙂 world, 日本 " * length
    ids = tokenizer.encode(text).tolist()[:length]
    bench, received, turns, more = Bench(tokenizer), list[Any](), 0, True
    bench.worker.handle(scored(1, ids, top))
    for token in ids[:600]:
        bench.worker.handle(TokenReply(uid=1, token=token, logprob=-2.0))
    while more:
        more = bench.worker.work()
        bench.worker.handle(TokenReply(uid=2, token=ids[0]))
        new, turns = bench.replies(), turns + 1
        assert [r.token_ids for r in new if r.uid == 2] == [ids[:1]], "another one's token waits"
        received += (own := [r for r in new if r.uid == 1])
        assert sum(len(r.token_ids) for r in own) <= 256
        assert sum(len(r.logprobs) for r in own) <= 256 + 32, "more than a character was held"
    assert turns > length // 256
    answer = [token for reply in received for token in reply.token_ids]
    entries = [entry for reply in received for entry in reply.logprobs]
    assert [entry.logprob for entry in entries[:length]] == [None, *range(-1, -length, -1)]
    assert [len(entry.top) for entry in entries[:length]] == [0, *[top] * (length - 1)]
    assert {reply.prompt_tokens for reply in received if reply.text} <= {length, 0}
    whole = "".join(reply.text for reply in received)
    assert whole.startswith(tokenizer.decode(ids)) and answer[:1] == [5]
    for entry in entries[: length + len(answer)]:
        assert "\ufffd" in entry.text or whole[entry.offset :].startswith(entry.text), entry


def test_a_scored_prompt_that_nobody_waits_for_is_dropped(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for uid in (1, 2):
        bench.worker.handle(scored(uid, [7] * 700))
    assert bench.worker.work() and bench.worker.work()
    assert [reply.uid for reply in bench.replies()] == [1, 2]  # they take turns
    bench.worker.handle(AbortMsg(uid=1))
    bench.worker.handle(TokenReply(uid=1, token=7, logprob=-1.0))
    bench.worker.handle(ErrorReply(uid=2, message="it broke"))
    while bench.worker.work():
        pass
    assert [type(reply) for reply in bench.replies()] == [ErrorReply]


def test_the_loop_does_not_wait_while_a_scored_prompt_is_left(tokenizer: Tokenizer) -> None:
    bench, waits = Bench(tokenizer), list[float]()

    class Inbox(Feed):
        def get_all(self, timeout: float) -> list[Any]:
            waits.append(timeout)
            return super().get_all(timeout) if self.batches else [ExitMsg()]

    run_text_worker(bench.worker, Inbox([scored(1, [7] * 500)], [], [], [], []))
    assert waits == [0.5, 0.0, 0.0, 0.0, 0.0, 0.5]
    assert [len(reply.token_ids) for reply in bench.replies()] == [0, 0, 1]


def test_a_long_prompt_stops_neither_answers_nor_short_prompts_nor_aborts(
    tokenizer: Tokenizer,
) -> None:
    """While a thread encodes, the loop takes all other messages; only then may it finish."""
    others_are_done = threading.Event()
    bench, sent = Bench(tokenizer), list[Any]()

    def slow(msg: TokenizeMsg) -> Any:
        if len(msg.text or "") > SLICE:
            assert others_are_done.wait(20)
        return UserMsg(msg.uid, [1], msg.sampling_params)

    class Scripted:
        """Long prompts, then all others; the end, once a long one has gone on."""

        def get_all(self, timeout: float) -> list[Any]:
            sent.extend(bench.sent())
            self.turns += 1
            if self.turns < 3:
                long = [text_of(0, SLICE + 1), text_of(1, SLICE + 2)]
                return long if self.turns == 1 else [text_of(2, 20), text_of(3, 9)]
            if len(sent) == 2 and not others_are_done.is_set():
                others_are_done.set()
                return [TokenReply(uid=8, token=5), AbortMsg(uid=7), AbortMsg(uid=1)]
            return [ExitMsg()] if len(sent) == 4 else []

        turns = 0

    bench.worker.encode = slow  # type: ignore[method-assign]
    run_text_worker(bench.worker, Scripted(), prompts=PromptQueue(PromptThreads()))
    kinds = [(type(m).__name__, m.uid) for m in sent]
    assert kinds[:2] == [("UserMsg", 3), ("UserMsg", 2)]  # the long ones were there before
    assert set(kinds[2:]) == {("AbortMsg", 7), ("UserMsg", 0)}  # and 1 has left
    assert [reply.uid for reply in bench.replies()] == [8, 1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=30))
def test_lanes_encode_each_prompt_once_unless_its_client_left(
    events: list[tuple[int, int]],
) -> None:
    """0 adds a short prompt, 1 a long one, 2 drops the prompt of that number."""
    lanes, sizes = PromptQueue(PromptThreads()), list[int]()
    done, dropped = list[int](), set[int]()

    def encode(msg: TokenizeMsg) -> Any:
        return UserMsg(msg.uid, [1], msg.sampling_params)

    for kind, number in events:
        if kind < 2:
            sizes.append(number + kind * (SLICE + 1))
            lanes.add(text_of(len(sizes) - 1, sizes[-1]))
        elif lanes.drop(number):
            assert number < len(sizes) and number not in dropped
            dropped.add(number)
        done += [msg.uid for msg in lanes.take(encode)]
    while lanes.patience < 0.5:
        done += [msg.uid for msg in lanes.take(encode)]
    assert sorted(done) == [uid for uid in range(len(sizes)) if uid not in dropped]


@pytest.mark.parametrize(
    "fields",
    [{"stop": ["a" * 1000] * 9}, {"bad_words": ["a" * 60] * 150}, {"bad_words": [[7] * 9]}],
)
def test_long_rules_do_not_stop_the_loop(fields: dict[str, Any]) -> None:
    """They are encoded, too."""
    aside = PromptQueue()
    lanes = PromptQueue(aside)
    params = SamplingParams(**fields)
    lanes.add(TokenizeMsg(uid=1, text="hi", sampling_params=params))
    assert (1 in aside.waiting) == ("7" not in str(fields)) != (1 in lanes.waiting)


def test_too_many_bad_tokens_are_refused_by_name(tokenizer: Tokenizer) -> None:
    """Before the scheduler sees them."""
    bench = Bench(tokenizer)
    params = SamplingParams(bad_words=[chr(0x1F600 + n) * 64 for n in range(60)])
    bench.worker.handle(TokenizeMsg(uid=1, text="hi", sampling_params=params))
    (error,), sent = bench.replies(), bench.sent()
    assert error.param == "bad_words" and error.code == "invalid_request" and not sent
    assert error.message.startswith("bad_words: must have at most 2048 tokens in all, got ")


class Bench:
    """A text worker whose surroundings are two lists."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.to_scheduler, self.to_frontend = LocalQueue(), LocalQueue()
        self.worker = build_text_worker(tokenizer, self.to_scheduler, self.to_frontend, WINDOW)

    def tokens(
        self, uid: int, ids: list[int], stop: tuple[str, ...] = (), end: bool = True
    ) -> None:
        for i, token in enumerate(ids):
            last = end and i == len(ids) - 1
            reason = "length" if last else None
            self.worker.handle(
                TokenReply(uid=uid, token=token, stop=stop, finished=last, finish_reason=reason)
            )

    def replies(self) -> list[Any]:
        self.worker.flush()
        return self.to_frontend.get_all(0.0)

    def sent(self) -> list[Any]:
        self.worker.flush()
        return self.to_scheduler.get_all(0.0)


def test_text_worker_gives_whole_characters_and_all_text(tokenizer: Tokenizer) -> None:
    bench, text = Bench(tokenizer), "Ünïcode 🙂 日本"
    bench.tokens(1, tokenizer.encode(text).tolist())
    replies = bench.replies()
    assert "".join(r.text for r in replies) == text
    assert "\ufffd" not in "".join(r.text for r in replies[:-1])
    assert [r.finished for r in replies] == [False] * (len(replies) - 1) + [True]
    assert replies[-1].completion_tokens == len(replies)


def test_text_worker_gives_what_it_held_back(tokenizer: Tokenizer) -> None:
    """The start of a stop string that never came is text after all."""
    bench = Bench(tokenizer)
    bench.tokens(1, tokenizer.encode("the END").tolist(), stop=("END!",))
    assert "".join(r.text for r in bench.replies()) == "the END"


def test_text_worker_stops_at_a_stop_string(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.tokens(1, tokenizer.encode("one two END three").tolist(), stop=("END",), end=False)
    replies = bench.replies()
    assert "".join(r.text for r in replies) == "one two "
    assert replies[-1].finished and replies[-1].finish_reason == "stop"
    assert sum(r.finished for r in replies) == 1
    assert bench.sent() == [AbortMsg(uid=1)]
    # The scheduler confirms; a later request may use the same uid.
    bench.worker.handle(TokenReply(uid=1, token=None, finished=True, finish_reason="abort"))
    assert bench.replies() == []
    bench.tokens(1, tokenizer.encode("END").tolist())
    assert "".join(r.text for r in bench.replies()) == "END"


@pytest.mark.parametrize("way", ["told", "stopped", "left"])
def test_text_worker_tells_why_a_grammar_failed(tokenizer: Tokenizer, way: str) -> None:
    """The reason is an error for the client; a frontend ignores it if the answer has ended."""
    bench, ids = Bench(tokenizer), tokenizer.encode("one two").tolist()
    bench.tokens(1, ids, stop=("two",) if way == "stopped" else (), end=False)
    if way == "left":
        bench.worker.handle(AbortMsg(uid=1))
    bench.replies()
    why = "regex: its masks take too long: simplify it"
    last = TokenReply(uid=1, token=ids[0], finished=True, finish_reason="abort", notice=why)
    bench.worker.handle(last)
    error = ErrorReply(uid=1, message=why, code="invalid_request", param="regex")
    assert bench.replies() == [error]
    if way == "left":
        bench.worker.handle(aborted(1))
        assert bench.replies() == [aborted(1)]
    assert not bench.worker._open and not bench.worker._left


def test_text_worker_drops_the_tokens_of_a_client_that_left(tokenizer: Tokenizer) -> None:
    """Tokens that wait when the abort comes are not decoded; the receipt ends it."""
    bench, ids = Bench(tokenizer), tokenizer.encode("one two three").tolist()
    bench.tokens(1, ids[:2], end=False)
    bench.worker.handle(AbortMsg(uid=1))
    bench.worker.handle(AbortMsg(uid=2))  # its first token was on the way
    assert len(bench.replies()) == 2 and bench.sent() == [AbortMsg(uid=1), AbortMsg(uid=2)]
    bench.tokens(1, ids * 10)
    bench.tokens(2, ids * 10, end=False)
    bench.tokens(3, ids[:1], end=False)
    assert [reply.uid for reply in bench.replies()] == [3], "others are answered"
    for uid in (1, 2):
        bench.worker.handle(aborted(uid))
    assert bench.replies() == [aborted(1), aborted(2)]
    bench.tokens(1, ids)
    assert "".join(reply.text for reply in bench.replies()) == "one two three"
    bench.worker.handle(AbortMsg(uid=3))
    bench.worker.handle(aborted(3))
    assert not bench.worker._open and not bench.worker._left


def test_an_extra_tokenizer_remembers_no_aborts(tokenizer: Tokenizer) -> None:
    """The tokens and the receipts go to another worker, so nothing would end the memory."""
    boxes = LocalQueue(), LocalQueue()
    worker = build_text_worker(tokenizer, *boxes, 99, ExtraTokenizer)
    for uid in range(3):
        worker.handle(AbortMsg(uid=uid))
    worker.handle(ErrorReply(uid=9, message="no"))
    worker.flush()
    assert [msg.uid for msg in boxes[0].get_all(0.0)] == [0, 1, 2]
    assert [msg.uid for msg in boxes[1].get_all(0.0)] == [9]
    assert not worker._left


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Of all three kinds."""
    folder = tmp_path_factory.mktemp("kinds")
    kinds = {"level": byte_level(), "fallback": byte_fallback(), "pieces": metaspace()}
    return [Tokenizer(save(folder / name, backend)) for name, backend in kinds.items()]


ENDS = st.sampled_from(["length", "stop", "abort"])
SPOKEN = st.lists(
    st.sampled_from(
        ["hello", " world", "\r\n", "\r", "\u2028", "😀", "👩‍👩‍👧", "é", "\x85", "日本"]
    )
    | st.integers(0, 255),
    max_size=8,
)


@given(
    st.integers(0, 2),
    SPOKEN,
    SPOKEN,
    st.lists(
        st.sampled_from(["hello", "o", " w", "\r", "\n", "\u2028", "😀", "\u200d", "\ufffd", "本"]),
        max_size=3,
    ),
    ENDS,
)
@example(1, [], [0, "hello"], [], "length")  # a space behind a special token
@settings(max_examples=150, deadline=None)
def test_served_text_is_that_of_llm(
    tokenizers: list[Tokenizer], kind: int, asked: list[str | int], said: list[str | int],
    stop: list[str], end: str,
) -> None:  # fmt: skip
    """Whatever the tokenizer, the tokens, the stop strings and the end: one text, one reason."""
    tokenizer = tokenizers[kind]

    def ids_of(parts: list[str | int]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            known = isinstance(part, int)
            ids += [part] if known else tokenizer.encode(part, False).tolist()  # type: ignore[arg-type, list-item]
        return ids

    prompt, tokens = ids_of(["hello", *asked]), ids_of(said) or [7]
    reasons: list[str | None] = [None] * (len(tokens) - 1) + [end]
    replies = [
        TokenReply(uid=1, token=token, finished=reason is not None, finish_reason=reason)
        for token, reason in zip(tokens, reasons)
    ]
    replies[-1].token = None if end == "abort" else tokens[-1]
    replies[0].stop, replies[0].prompt_tail = tuple(stop), tuple(prompt[-PROMPT_TAIL:])
    params = SamplingParams(stop=stop)
    offline, bench = OutputBuilder(np.array(prompt, np.int32), params, tokenizer), Bench(tokenizer)
    for reply in replies:
        bench.worker.handle(reply)
        if not offline.done:
            offline.push(reply)
    served = bench.replies()
    text = "".join(reply.text for reply in served)
    assert text == offline.out["text"]
    assert served[-1].finish_reason == offline.out["finish_reason"]
    assert [reply.finished for reply in served] == [False] * (len(served) - 1) + [True]
    assert [t for reply in served for t in reply.token_ids] == offline.out["token_ids"]
    assert served[-1].completion_tokens == len(offline.out["token_ids"])
    spoken = tokens[:-1] if end != "length" else tokens
    tail = prompt[-PROMPT_TAIL:]
    whole, before = tokenizer.decode([*tail, *spoken]), tokenizer.decode(tail)
    if not stop and whole.startswith(before) and "\ufffd" not in whole[len(before) :]:
        assert text == whole[len(before) :]
    assert not any(one in text for one in stop)


def test_what_is_constant_travels_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a heavy request weighs what one of a light request does."""
    weights: dict[type, list[int]] = {}
    put = LocalQueue.put

    def weigh(box: LocalQueue, *messages: Any) -> None:
        for msg in messages:
            weights.setdefault(type(msg), []).append(len(encode([msg])))
        put(box, *messages)

    monkeypatch.setattr(LocalQueue, "put", weigh)
    heavy = {
        "stop": [f"never{n}" + "x" * 900 for n in range(64)],
        "logit_bias": {str(n): -1 for n in range(20, 300)},
        "bad_words": [f"word{n}" for n in range(100)],
        "allowed_token_ids": list(range(20, 300)),
        "stop_token_ids": list(range(300, 310)),
        "user": "u" * 500,
    }
    found = []
    for fields in ({}, heavy):
        weights.clear()
        answer = chat(live, max_tokens=12, ignore_eos=True, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 12, answer.text
        assert len(weights[TokenizeMsg]) == len(weights[UserMsg]) == 1
        assert len(weights[TokenReply]) == 12
        found.append(weights[TokenReply][1:] + weights[UserReply])
    light, loaded = found
    assert max(loaded) <= max(light) + 8 < 400


def test_text_worker_answers_a_bad_prompt_and_lives(tokenizer: Tokenizer) -> None:
    bench, params = Bench(tokenizer), SamplingParams()
    bench.worker.handle(TokenizeMsg(uid=1, sampling_params=params, messages=[{"role": "user"}]))
    bench.worker.handle(TokenizeMsg(uid=2, sampling_params=params, text="\ud800"))
    errors = bench.replies()
    assert [(e.uid, e.param) for e in errors] == [(1, "messages"), (2, "prompt")]
    bench.worker.handle(TokenizeMsg(uid=3, sampling_params=params, text="fine"))
    assert [m.uid for m in bench.sent()] == [3]


# API


def test_chat_answer_has_the_fields_that_clients_read(live: Live) -> None:
    reply = chat(live).json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    usage = reply["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_stream_equals_whole(live: Live) -> None:
    whole = chat(live, seed=1).json()
    text = chat(live, seed=1, stream=True, stream_options={"include_usage": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("role" not in d["delta"] for d in deltas[1:])
    assert [d["finish_reason"] for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1]["finish_reason"] == "length"
    said = "".join(d["delta"]["content"] for d in deltas)
    assert said == whole["choices"][0]["message"]["content"]
    assert len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1


def test_openai_sdk_works(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="any")
    name = client.models.list().data[0].id
    whole = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5, seed=0
    )
    assert whole.usage is not None and whole.usage.completion_tokens == 5
    stream = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=5, seed=0, stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert text == whole.choices[0].message.content
    done = client.completions.create(model=name, prompt=["a", "b"], max_tokens=2, n=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=name, prompt=[5] * (WINDOW + 1))
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


@pytest.mark.parametrize(
    ("prompt", "choices"), [("hello", 1), ([5, 6, 7], 1), (["a", "b"], 2), ([[5], [6, 7]], 2)]
)
def test_completion_takes_every_spelling_of_a_prompt(live: Live, prompt: Any, choices: int) -> None:
    body = {"prompt": prompt, "max_tokens": 3}
    reply = httpx.post(f"{live.url}/v1/completions", json=body, timeout=300).json()
    assert [c["index"] for c in reply["choices"]] == list(range(choices))
    assert reply["usage"]["completion_tokens"] == 3 * choices


def test_nulls_mean_defaults_and_unknown_fields_are_ignored(live: Live) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "top_k", "stop", "seed", "n", "stream", "tools", "logprobs"]
    )
    assert chat(live, **nulls, made_up=1, response_format={"type": "text"}).status_code == 200


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative max_tokens": ({"max_tokens": -3}, "max_tokens"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "negative temperature": ({"temperature": -0.5}, "temperature"),
    "top_p above one": ({"top_p": 1.5}, "top_p"),
    "top_k text": ({"top_k": "many"}, "top_k"),
    "no answers": ({"n": 0}, "n"),
    "no messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "seed": ({"seed": "lucky"}, "seed"),
    "stop": ({"stop": [1, 2]}, "stop"),
    "empty stop": ({"stop": ""}, "stop"),
    "max_tokens beyond 64 bits": ({"max_tokens": 10**30}, "max_tokens"),
    "top_k beyond 64 bits": ({"top_k": 10**30}, "top_k"),
    "streamed max_tokens beyond 64 bits": ({"max_tokens": 10**30, "stream": True}, "max_tokens"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    "longer than the window": ({"messages": [{"role": "user", "content": "a " * 999}]}, "messages"),
    "half a character to stop at": ({"stop": "a\udfff", "stream": True}, "stop"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_field_is_named_and_the_server_lives(live: Live, name: str) -> None:
    fields, param = BAD[name]
    response = chat(live, **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert set(error) == {"message", "type", "param", "code"} and param in error["message"]
    assert chat(live).status_code == 200


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "response_format": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        r'\{"ok": ?(true|false), ?"size": ?"(small|large)"\}',
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
    "guided_json": ({"guided_json": SCHEMA}, r"\{.*\}"),
    "guided_regex": ({"guided_regex": "[0-9]{3}x"}, "[0-9]{3}x"),
    "structured_outputs": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "regex": ({"regex": "a{3}"}, "aaa"),
    "ebnf": ({"ebnf": 'root ::= "x" [0-9]'}, "x[0-9]"),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_an_answer(live: Live, name: str) -> None:
    fields, pattern = FORMS[name]
    choice = chat(live, max_tokens=60, **fields).json()["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"])
    assert choice["finish_reason"] == "stop" or name == "json_object"  # it may be any size


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_json": {"type": "foo"}}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs"),
        ({"structured_outputs": ["a"]}, "structured_outputs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    response = chat(live, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert chat(live).status_code == 200


@pytest.mark.parametrize("field", ["prompt", "stop"])
def test_half_a_character_is_no_text(field: str) -> None:
    with pytest.raises(ApiError, match=r"unpaired surrogate .* at character 1"):
        CompletionRequest.model_validate({"prompt": "x", field: "a\ud800"})


def test_error_names_the_place_that_went_furthest(live: Live) -> None:
    """A field of several types fails once for each: the message is of the one that was meant."""
    image = [{"role": "user", "content": [{"type": "image_url"}]}]
    assert "messages.0.content.0.type: " in chat(live, messages=image).json()["error"]["message"]
    response = httpx.post(f"{live.url}/v1/completions", json={"prompt": [5, -1]}, timeout=100)
    message = response.json()["error"]["message"]
    assert message.startswith("prompt.1: ") and message.endswith("got -1"), message


def test_fault_of_ours_ends_a_stream(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, a client gets an error: at the start a 500, later an event."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OverflowError("a number too large")

    monkeypatch.setattr(live.server.to_text, "put", broken)
    for n in (1, 2):  # several answers go through a queue
        response = chat(live, stream=True, n=n)
        assert response.status_code == 500 and "too large" in response.json()["error"]["message"]

    async def failing(*_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        broken()
        yield

    monkeypatch.setattr(live.server.frontend, "generate", failing)
    assert chat(live, stream=True, n=2).status_code == 500

    async def events() -> AsyncGenerator[bytes, None]:
        broken()
        yield b"two"

    async def collect() -> list[bytes]:
        stream = EventStream(b"one", events())
        return [bytes(event) async for event in stream.body_iterator]  # type: ignore[arg-type]

    first, last = asyncio.run(collect())
    assert first == b"one" and b'"internal_error"' in last


def test_hopeless_text_is_refused_unread(tokenizer: Tokenizer) -> None:
    """Encoding megabytes would keep everybody waiting; what cannot fit is not encoded."""
    bench = Bench(tokenizer)
    for uid, prompt in enumerate(({"text": "ab cd " * 300_000}, None)):
        fields = prompt or {"messages": [{"role": "user", "content": "x" * 1_500_000}]}
        started = time.process_time()
        bench.worker.handle(TokenizeMsg(uid=uid, sampling_params=SamplingParams(), **fields))
        assert time.process_time() - started < 0.1
        (error,) = bench.replies()
        assert error.code == "context_length_exceeded" and str(WINDOW) in error.message
        assert "characters" in error.message
    # Every text that fits passes: the longest token as often as the window allows.
    token = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.decode([i])))
    text = tokenizer.decode([token]) * (WINDOW - 1)
    bench.worker.handle(TokenizeMsg(uid=9, text=text, sampling_params=SamplingParams()))
    assert bench.replies() == [] and len(bench.sent()) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("best_of", 3), ("logit_bias", {"5": 101})],
)
def test_completion_refuses_what_it_would_ignore(live: Live, field: str, value: Any) -> None:
    response = httpx.post(f"{live.url}/v1/completions", json={"prompt": "x", field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_nan_and_broken_json_are_refused(live: Live) -> None:
    url, headers = f"{live.url}/v1/chat/completions", {"content-type": "application/json"}
    nan = b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    endless, deep = b'{"seed": 1' + b"0" * 5000 + b"}", b"[" * 99_999
    for content in (b"{not json", b"\xff\xfe", endless, deep, b"", b"[]", nan):
        response = httpx.post(url, content=content, headers=headers)
        assert response.status_code == (413 if content is deep else 400), content
        wrong_json = content not in (b"", b"[]", nan, deep)
        assert (response.json()["error"]["code"] == "invalid_json") is wrong_json
    assert httpx.get(f"{live.url}/nowhere").json()["error"]["code"] == "http_404"
    assert httpx.get(url).status_code == 405


def test_pitfall_10_11_12_prompts_that_can_never_run_get_an_answer(live: Live) -> None:
    """Too long for the window, larger than the pool, empty, unknown ids: an error each, at once."""
    cases = {
        "window": ([5] * (WINDOW + 1), "context_length_exceeded"),
        "empty": ([], "invalid_request"),
        "unknown id": ([5, 10_000], "invalid_request"),
        "huge id": ([2**40], "invalid_value"),
        "negative id": ([-1], "invalid_value"),
    }
    for name, (prompt, code) in cases.items():
        response = httpx.post(f"{live.url}/v1/completions", json={"prompt": prompt}, timeout=100)
        assert response.status_code == 400, name
        assert response.json()["error"]["code"] == code, name
    stream = httpx.post(
        f"{live.url}/v1/completions", json={"prompt": [5] * 999, "stream": True}, timeout=100
    )
    assert stream.status_code == 400  # not a broken stream
    live.assert_pages_home()


def test_pool_smaller_than_a_prompt(checkpoint: Path) -> None:
    config = ServerConfig(model_path=str(checkpoint), num_pages=4)
    with InProcessServer(config) as server:
        app = create_app(server.frontend, settings_for(config, checkpoint))

        async def both() -> tuple[httpx.Response, httpx.Response]:
            transport = httpx.ASGITransport(app)
            async with (
                app.router.lifespan_context(app),
                httpx.AsyncClient(transport=transport, base_url="http://t", timeout=200) as client,
            ):
                large = client.post("/v1/completions", json={"prompt": [5] * 80})
                small = client.post("/v1/completions", json={"prompt": [5] * 8, "max_tokens": 4})
                return await large, await small

        large, small = asyncio.run(both())
    assert large.status_code == 400 and "KV cache" in large.json()["error"]["message"]
    assert small.json()["usage"]["completion_tokens"] == 4


def test_pitfall_14_a_client_that_leaves_frees_its_pages(live: Live) -> None:
    """Hang up while streaming, while waiting for a whole answer, and while queued."""
    long = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    with httpx.stream("POST", f"{live.url}/v1/completions", json={**long, "stream": True}) as reply:
        next(reply.iter_lines())
    live.assert_pages_home()
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json={**long, "n": 3}, timeout=0.05)
    live.assert_pages_home()


def test_many_clients_at_once_get_what_each_alone_would_get(live: Live) -> None:
    prompts = [f"request {i} " * (i % 5 + 1) for i in range(12)]

    async def ask(client: httpx.AsyncClient, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

    async def all_at_once() -> list[str]:
        async with httpx.AsyncClient(base_url=live.url, timeout=300) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    async def one_by_one() -> list[str]:
        async with httpx.AsyncClient(base_url=live.url, timeout=300) as client:
            return [await ask(client, prompt) for prompt in prompts]

    assert asyncio.run(all_at_once()) == asyncio.run(one_by_one())
    live.assert_pages_home()


def test_stop_string_over_http(live: Live) -> None:
    free = httpx.post(
        f"{live.url}/v1/completions", json={"prompt": "abc", "max_tokens": 40, "temperature": 0}
    ).json()["choices"][0]["text"]
    stop = free[3:5]
    cut = httpx.post(
        f"{live.url}/v1/completions",
        json={"prompt": "abc", "max_tokens": 40, "temperature": 0, "stop": [stop]},
    ).json()["choices"][0]
    assert cut["text"] == free[: free.index(stop)] and cut["finish_reason"] == "stop"
    live.assert_pages_home()


def test_key_and_model_name_are_checked() -> None:
    frontend = Frontend([LocalQueue()], LocalQueue())
    app = create_app(frontend, ApiSettings("mine", 128, api_key="secret"))

    async def codes() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            good = {"authorization": "Bearer secret"}
            body = {"model": "other", "prompt": "x"}
            return [
                (await client.get("/v1/models")).status_code,
                (await client.get("/v1/models", headers=good)).status_code,
                (await client.post("/v1/completions", json=body, headers=good)).status_code,
                (await client.get("/health")).status_code,
            ]

    assert asyncio.run(codes()) == [401, 200, 404, 200]


@pytest.mark.parametrize(
    ("reason", "failure", "expected"),
    [
        (None, None, (200, "ok")),
        (LOADING, None, (503, "loading")),
        (DRAINING, None, (503, "draining")),
        (DRAINING, DRAINING, (503, "draining")),
        (None, "the scheduler died", (503, "failed")),
        (LOADING, "the scheduler died", (503, "failed")),
    ],
)
def test_health_has_a_word_for_each_state(
    reason: str | None, failure: str | None, expected: tuple[int, str]
) -> None:
    """A gateway reads the status alone; a person who asks why reads the word."""
    frontend = Frontend([LocalQueue()], LocalQueue())
    frontend.failure = failure
    app = create_app(frontend, ApiSettings("mine", 128), ConcurrencyLimiter(4, reason))

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.get("/health")

    response = asyncio.run(get())
    body = response.json()
    assert (response.status_code, body["status"]) == expected
    assert ("retry-after" in response.headers) is ("error" in body) is (expected[0] == 503)


def test_first_prompts_of_a_burst_do_not_wait_for_the_last() -> None:
    sent: list[list[int]] = []

    class Outbox:
        def put(self, *messages: Any) -> None:
            sent.append([msg.uid for msg in messages])

    async def run() -> None:
        frontend, count = Frontend([Outbox()], LocalQueue(), together=4), 11
        streams = [frontend.generate(SamplingParams(), text="x") for _ in range(count)]
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)  # all tasks have taken their first turn
        assert [len(uids) for uids in sent] == [4, 4]
        await asyncio.sleep(0)
        assert [uid for uids in sent for uid in uids] == list(range(count)) and len(sent) == 3
        frontend.fail_all("over")
        await asyncio.gather(*firsts, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("moment", range(1, 6))
@pytest.mark.parametrize("end", ["work", "client", "server", "client, then server"])
def test_work_ends_with_its_client(end: str, moment: int) -> None:
    """It gives its result, None if the client left, and a cancellation to whoever cancels."""

    async def run() -> None:
        done, left, ended = asyncio.Event(), asyncio.Event(), []

        async def work() -> str:
            try:
                await done.wait()
                return "result"
            finally:
                ended.append(True)

        async def receive() -> dict[str, str]:
            await left.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http"}, receive)
        task = asyncio.ensure_future(cancel_on_disconnect(request, work()))
        for _ in range(moment):
            await asyncio.sleep(0)
        if end == "work":
            done.set()
        if end.startswith("client"):
            left.set()
        if end == "client, then server":
            await asyncio.sleep(0)
        if end.endswith("server"):
            task.cancel()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        if end == "work":
            assert found == "result"
        elif end == "client":
            assert found is None
        else:
            assert isinstance(found, asyncio.CancelledError) or (found is None and "client" in end)
        assert ended
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_dead_worker_is_a_503_for_all() -> None:
    async def run() -> None:
        frontend = Frontend([LocalQueue()], LocalQueue())
        stream = frontend.generate(SamplingParams(), text="x")
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        frontend.fail_all("the scheduler died")
        with pytest.raises(RequestFailed, match="died"):
            await asyncio.wait_for(waiting, timeout=60)
        app = create_app(frontend, ApiSettings("mine", 128))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            assert (await client.get("/health")).status_code == 503
            response = await client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503 and "died" in response.json()["error"]["message"]

    asyncio.run(run())


def test_an_error_behind_a_reply_is_not_lost() -> None:
    """The worker dies while a reply waits: its reader gets the reply, then the error."""

    async def run() -> tuple[str, bool]:
        frontend = Frontend([LocalQueue()], LocalQueue())
        replies = frontend.generate(SamplingParams(), text="x")
        first = asyncio.ensure_future(anext(replies))
        await asyncio.sleep(0)
        frontend._dispatch([UserReply(uid=0, text="yes", token_ids=[1])])
        frontend.fail_all("the scheduler died")
        text = (await first).text
        second = asyncio.ensure_future(anext(replies))
        for _ in range(9):  # turns of a loop that has nothing else to do
            await asyncio.sleep(0)
        done = second.done()
        await asyncio.gather(second, return_exceptions=True) if done else second.cancel()
        return text, done

    assert asyncio.run(run()) == ("yes", True)


def test_an_observer_that_fails_harms_no_request() -> None:
    """A full disk under a trace: the request goes on, and its abort is sent."""

    class Broken(Observer):
        calls = 0

        def opened(self, uid: int, request_id: str, prompt: Any) -> None:
            self.calls += 1
            raise OSError("No space left on device")

    broken, outbox = Broken(), LocalQueue()
    frontend = Frontend([outbox], LocalQueue(), [broken])

    async def run() -> str:
        for _ in range(2):
            replies = frontend.generate(SamplingParams(), text="x")
            first = asyncio.ensure_future(anext(replies))
            await asyncio.sleep(0)
            (uid,) = frontend._streams
            frontend._dispatch([UserReply(uid=uid, text="yes", token_ids=[1])])
            text = (await first).text
            await replies.aclose()
        return text

    assert asyncio.run(run()) == "yes" and broken.calls == 2  # and goes on being called
    assert [type(msg) for msg in outbox.get_all(0.0)] == [TokenizeMsg, AbortMsg] * 2


def test_bytes_that_are_no_message_end_every_stream() -> None:
    """Their request is unknown, and the listener cannot go on: no stream may wait for it."""

    class Inbox:
        def get_all(self, timeout: float) -> list[Any]:
            return decode(b"")

    async def run() -> None:
        frontend = Frontend([LocalQueue()], Inbox())
        waiting = asyncio.ensure_future(anext(frontend.generate(SamplingParams(), text="x")))
        await asyncio.sleep(0)
        await frontend.start()
        with pytest.raises(RequestFailed, match="inbox") as failure:
            await asyncio.wait_for(waiting, timeout=60)
        assert failure.value.code == "service_unavailable" and frontend.failure
        await asyncio.to_thread(frontend.close)

    asyncio.run(run())


def test_a_conversion_whose_caller_left_is_not_encoded() -> None:
    async def run() -> list[Any]:
        outbox = LocalQueue()
        frontend = Frontend([outbox], LocalQueue())
        for reply in (None, Converted(uid=1, text="", token_ids=[5])):
            task = asyncio.ensure_future(frontend.convert(text="x"))
            await asyncio.sleep(0)
            frontend._dispatch([] if reply is None else [reply])
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return outbox.get_all(0.0)

    assert [type(msg) for msg in asyncio.run(run())] == [ConvertMsg, AbortMsg, ConvertMsg]


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {"temperature": 1.0}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "top_k": 5})
    assert body.sampling_params(sampling_defaults(tmp_path)).top_k == 5
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert sampling_defaults(tmp_path) == {"temperature": 0.0}


def test_uids_are_spread_but_a_request_keeps_its_worker() -> None:
    """An abort must travel the way of its prompt, or it overtakes it."""

    async def run() -> list[list[Any]]:
        boxes = [LocalQueue(), LocalQueue()]
        frontend = Frontend(boxes, LocalQueue())
        for _ in range(4):
            stream = frontend.generate(SamplingParams(), text="x")
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return [box.get_all(0.0) for box in boxes]

    boxes = asyncio.run(run())
    kinds = [[(type(m).__name__, m.uid) for m in box] for box in boxes]
    assert kinds[0] == [("TokenizeMsg", 0), ("AbortMsg", 0), ("TokenizeMsg", 2), ("AbortMsg", 2)]
    assert [uid for _, uid in kinds[1]] == [1, 1, 3, 3]


def test_pitfall_13_no_second_bos_over_http(tokenizer: Tokenizer, checkpoint: Path) -> None:
    bench = Bench(tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    bench.worker.handle(TokenizeMsg(uid=1, sampling_params=SamplingParams(), messages=messages))
    (sent,) = bench.sent()
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert np.array_equal(sent.input_ids, expected)
