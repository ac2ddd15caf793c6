"""Foreign chats and grammars that are late, large or fatal fail alone."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import psutil
import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from minisgl.config.engine import ServerConfig
from minisgl.config.model import ModelConfig, RotaryConfig
from minisgl.config.paths import resolve_model_path
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.scheduler import forms
from minisgl.scheduler.messages import ErrorReply, InvalidRequestError, UserMsg
from minisgl.scheduler.side import MAX_ANSWER, Side, SideProcess, SideTokenizer, packed
from minisgl.server.frontend import RequestFailed
from minisgl.server.in_process import InProcessServer
from minisgl.server.workers.messages import ConvertMsg, TokenizeMsg
from minisgl.server.workers.prompt_threads import LONG as LONG_TEXT
from minisgl.server.workers.prompt_threads import PromptThreads
from minisgl.server.workers.text_worker import PromptQueue
from minisgl.tokenizer import Tokenizer
from tests.serving import wait_for

FOLDER = resolve_model_path(None)
LOOPS = "{% for a in messages[0].content %}" * 9 + "{% endfor %}" * 9
ENDLESS = [{"role": "user", "content": "endless" * 100}]
OPEN = {"add_generation_prompt": True}
CHAT = [{"role": "user", "content": "Hi"}]
NUMBER = SamplingParams(regex="[0-9]+")
LONG = [{"role": "user", "content": "x" * 2**22}]  # it takes longer than no time at all
SLOW = SamplingParams(choice=[f"{i} or so" for i in range(1000)])


def side_of(template: str, seconds: float = 60.0) -> Side:
    return Side(({"default": template}, {}, str(FOLDER), 0, []), seconds)


def side_processes() -> list[psutil.Process]:
    """Return all side processes of this process, those of other tests included."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if "minisgl.scheduler.side" in " ".join(process.cmdline()):
                found.append(process)
    return found


Started = Callable[[], list[psutil.Process]]


@pytest.fixture
def started() -> Started:
    """Return the side processes that were started since; earlier ones may end at any time."""
    earlier = {process.pid for process in side_processes()}
    return lambda: [process for process in side_processes() if process.pid not in earlier]


@pytest.fixture
def tokenizer() -> Iterator[SideTokenizer]:
    made = SideTokenizer(FOLDER)
    yield made
    made.side.close()


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> list[SideProcess]:
    """The processes that got a chat to render, in order; one that has just started got none yet."""
    asked, call = list[SideProcess](), SideProcess.call

    def noted(self: SideProcess, seconds: float, job: bytes) -> Any:
        if msgspec.msgpack.decode(job)[1] == "render":
            asked.append(self)
        return call(self, seconds, job)

    monkeypatch.setattr(SideProcess, "call", noted)
    return asked


def refused(call: Callable[[], object]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return caught.value


def test_a_late_job_ends_with_its_process_and_the_next_one_is_served(started: Started) -> None:
    template = "{% if messages[0].content|length > 9 %}" + LOOPS + "{% else %}yes{% endif %}"
    side = side_of(template, seconds=0.3)
    error = refused(lambda: side.call("render", ENDLESS, OPEN))
    assert error.param == "messages" and "must render within 0.3 seconds" in error.message
    assert len(started()) == 1  # for the next
    side._seconds = 600.0  # a machine under load may need long for the next
    assert side.call("render", CHAT, OPEN) == "yes"
    side.close()
    assert not started()


def test_a_grammar_has_a_deadline() -> None:
    hurried = SideTokenizer(FOLDER, seconds=0.0)
    error = refused(lambda: hurried.encode_params(SLOW))
    assert error.param == "choice" and error.message.startswith("choice: must compile within 0 s")


def test_grammars_are_converted_in_the_side_process_alone(
    tokenizer: SideTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scheduler gets is in Lark's notation; its checks and masks are as before."""
    given = 'root ::= word ("," word)*\nword ::= [a-z]{2}\n'
    monkeypatch.setattr(forms, "gbnf_to_lark", pytest.fail)
    params = tokenizer.encode_params(SamplingParams(grammar=given))
    assert params.grammar == gbnf_to_lark(given) and forms.free_grammar(params.grammar)
    assert tokenizer.encode_params(params) == params
    lark = SamplingParams(grammar='start: "a"')
    assert tokenizer.encode_params(lark) == lark
    blank = SamplingParams(grammar="\n" * 16_000 + 'x: "a"\nstart: x')
    start = time.process_time()
    assert forms.as_lark(str(blank.grammar)) == blank.grammar
    assert time.process_time() - start < 0.2
    error = refused(lambda: tokenizer.encode_params(SamplingParams(grammar="root ::= (")))
    assert error.param == "grammar"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 'a' * 10**11 }}", "messages: MemoryError"),
        ("{{ 'a' * 2**28 }}", "messages: MemoryError"),
        ("{{ 'a' * 4 * 10**7 }}", rf"messages: become 400000\d\d bytes, {MAX_ANSWER} at most"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_what_a_template_raises_is_an_answer(started: Started, template: str, why: str) -> None:
    side = side_of(template)
    with pytest.raises((RuntimeError, ValueError), match=f"^{why}$"):
        side.call("render", CHAT, OPEN)
    assert len(started()) == 1  # it serves on
    side.close()


def test_a_chat_that_cannot_be_sent_harms_no_process(
    started: Started, tokenizer: SideTokenizer
) -> None:
    """Half a character, an integer of more than 64 bits, in a call's arguments or beside them."""
    tokenizer.render_chat(CHAT)
    (process,) = started()
    for value in (2**70, -(2**63) - 1, "\ud800"):
        for arguments in (json.dumps({"a": [value]}), {"a": [value]}):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            with suppress(ValueError):
                tokenizer.render_chat([*CHAT, said, *CHAT])
        with pytest.raises(ValueError):
            tokenizer.templates.render([{"role": "user", "content": value}], **OPEN)
    tokenizer.render_chat(CHAT)
    assert started() == [process]


def test_an_error_that_quotes_half_a_character_is_an_answer(
    started: Started, tokenizer: SideTokenizer
) -> None:
    """In the name of a structural tag, or in what a template says; none costs a process."""
    for half in ("\ud800", "x\udfff"):
        tag = json.dumps({"name": half, "format": {"type": "unknown"}})
        given = SamplingParams(structural_tag=tag)
        error = refused(lambda given=given: tokenizer.encode_params(given))
        assert error.param == ascii(half)[1:-1] and error.message.startswith(f"{error.param}: ")
    (process,) = started()
    tokenizer.render_chat(CHAT)
    assert started() == [process]
    side = side_of("{{ raise_exception('a\\ud800') }}")
    with pytest.raises(RuntimeError, match=r"^a\\ud800$"):
        side.call("render", CHAT, OPEN)
    side.close()


def test_a_process_that_has_died_is_replaced(started: Started, tokenizer: SideTokenizer) -> None:
    first = tokenizer.render_chat(CHAT)
    (idle,) = started()
    idle.kill()
    idle.wait(20)
    assert tokenizer.render_chat(CHAT) == first


def test_a_crash_is_an_error_of_its_own_request(rendering: list[SideProcess]) -> None:
    side, found = side_of(LOOPS), list[str]()

    def ask() -> None:
        found.append(refused(lambda: side.call("render", ENDLESS, OPEN)).message)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: bool(rendering), "the chat to be rendered")
    rendering[0]._process.send_signal(signal.SIGSEGV)
    thread.join(60)
    assert found and found[0].startswith("messages: must render within")


def test_the_kernel_ends_a_job_that_nobody_waits_for() -> None:
    process = SideProcess(msgspec.msgpack.encode(({"default": LOOPS}, {}, "", 0, [])))
    process.call(60.0, packed(60.0, "start"))
    with pytest.raises(TimeoutError):
        process.call(0.0, packed(0.0, "render", ENDLESS, OPEN))
    assert process._process.wait(120) == -signal.SIGXCPU
    process.end()


def test_a_side_process_gets_no_secrets(
    started: Started, tokenizer: SideTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINISGL_API_KEY", "sk-secret")
    tokenizer.side.start()
    tokenizer.render_chat(CHAT)
    (process,) = started()
    assert "sk-secret" not in str(process.environ())


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        (CHAT, {}),
        ([*CHAT, {"role": "assistant", "content": "Hel"}], {"continue_final_message": True}),
        (({"role": "user", "content": ["a", {"type": "text", "text": "b"}]},), {"x": (1, 2)}),
        ([], {}),
        ([{"role": "user"}], {}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}),
        (CHAT, {"tools": [{"type": "function"}]}),
    ],
)
def test_chats_are_rendered_as_beside_nothing(
    tokenizer: SideTokenizer, messages: Any, variables: dict[str, Any]
) -> None:
    def outcome(by: Tokenizer) -> object:
        try:
            return by.render_chat(messages, **variables)
        except ValueError as error:
            return str(error)

    assert outcome(tokenizer) == outcome(Tokenizer(FOLDER))


def test_what_is_not_json_is_refused(tokenizer: SideTokenizer) -> None:
    for odd in (object(), 2**80, "\ud800"):
        with pytest.raises(ValueError, match=r"^messages: must hold"):
            tokenizer.render_chat(CHAT, odd=odd)
    assert tokenizer.render_chat(CHAT)


# ------------------------------------------------------------------ the text worker and the rest


def test_chats_and_grammars_go_aside() -> None:
    lanes = PromptQueue(PromptThreads())
    for uid, fields in enumerate(
        ({"text": "a"}, {"messages": CHAT}, {"text": "a", "sampling_params": NUMBER})
    ):
        lanes.add(TokenizeMsg(uid=uid, **fields))
    lanes.add(ConvertMsg(uid=3, messages=CHAT))
    lanes.add(ConvertMsg(uid=4, input_ids=[300] * 130_000))
    lanes.add(ConvertMsg(uid=5, input_ids=[300]))
    assert lanes.aside is not None and lanes.waiting.keys() == {0, 5}
    assert lanes.aside.waiting.keys() == {1, 2, 3, 4}


def test_the_cost_of_a_grammar_comes_with_its_request(
    tokenizer: SideTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side process measures it; also for all answers, and for a text that came before."""
    monkeypatch.setattr(tokenizer.side, "limit", tokenizer.side.limit)  # and put back
    threads = PromptThreads(1, tokenizer.side)

    def encode(msg: TokenizeMsg) -> UserMsg:
        return UserMsg(msg.uid, [1], tokenizer.encode_params(msg.sampling_params))

    both = [{"enum": [f"x{n}" for n in range(14)]}] * 3 + [{"type": "string", "format": "email"}]
    slow = SamplingParams(json_schema={"type": "object", "properties": {"k": {"allOf": both}}})
    asked = [slow, slow, SamplingParams(regex="a"), slow, SamplingParams()]
    for uid, params in enumerate(asked):
        client = "n" if uid < 2 else str(uid)
        threads.add(TokenizeMsg(uid=uid, text="a", sampling_params=params, client=client))
    made = dict[int, Any]()

    def take() -> bool:
        made.update((msg.uid, msg) for msg in threads.take(encode))
        return len(made) == len(asked)

    wait_for(take, "all prompts")
    costs = [made[uid].cost for uid in range(len(asked))]
    assert costs[0] == costs[1] == costs[3] > 0.05 > costs[2] >= costs[4] == 0, costs
    memory = [made[uid].memory for uid in range(len(asked))]
    if hasattr(psutil, "heap_info"):
        assert memory[0] == memory[1] == memory[3] > memory[2] > memory[4] == 0, memory


def test_a_grammar_that_is_measured_again_may_fail(
    tokenizer: SideTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result was forgotten meanwhile; its request was accepted, and goes on as a slow one."""
    monkeypatch.setattr(tokenizer.side, "limit", tokenizer.side.limit)  # and put back
    threads = PromptThreads(1, tokenizer.side)
    monkeypatch.setattr(tokenizer.side, "compile", Mock(side_effect=InvalidRequestError("late")))
    threads.add(TokenizeMsg(uid=7, text="a", sampling_params=NUMBER))
    made = list[Any]()

    def take() -> bool:
        made.extend(threads.take(lambda msg: UserMsg(msg.uid, [1], msg.sampling_params)))
        return bool(made)

    wait_for(take, "the prompt")
    assert [msg.uid for msg in made] == [7] and made[0].cost > 0.5 and not threads._jobs
    assert made[0].memory > 2**22


def test_two_clients_leave_a_thread_free() -> None:
    threads, gate = PromptThreads(4), threading.Event()
    for uid in range(12):
        threads.add(TokenizeMsg(uid=uid, messages=[*CHAT], client=f"greedy {uid % 2}"))
    try:
        threads.take(lambda msg: UserMsg(msg.uid, [int(gate.wait(60))]))
        assert sorted(threads._jobs) == [0, 1, 2]
        threads.add(TokenizeMsg(uid=12, messages=CHAT, client="other"))
        threads.take(lambda msg: UserMsg(msg.uid, [int(gate.wait(60))]))
        assert sorted(threads._jobs) == [0, 1, 2, 12]
    finally:
        gate.set()


def test_a_thread_is_left_for_short_prompts() -> None:
    threads, gate = PromptThreads(4), threading.Event()
    for uid in range(8):
        threads.add(TokenizeMsg(uid=uid, text="x" * (LONG_TEXT + 1), client=f"long {uid}"))
    try:
        threads.take(lambda msg: UserMsg(msg.uid, [int(gate.wait(60))]))
        assert sorted(threads._jobs) == [0, 1, 2]
        threads.add(TokenizeMsg(uid=8, messages=CHAT, client="short"))
        threads.take(lambda msg: UserMsg(msg.uid, [int(gate.wait(60))]))
        assert sorted(threads._jobs) == [0, 1, 2, 8]
    finally:
        gate.set()
    while threads.waiting:  # the others had to wait, no more
        threads.take(lambda msg: UserMsg(msg.uid, [1]))


def test_a_thread_in_a_hurry_gives_a_job_up() -> None:
    """And the next job finds another process."""
    side = side_of("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}")
    asked = list[float]()
    side.limit = lambda seconds: asked.append(seconds) or 0.2  # type: ignore[func-returns-value]
    with pytest.raises(InvalidRequestError, match=r"must render within 60 seconds"):
        side.call("render", CHAT, OPEN)
    assert asked == [60.0] and len(side._idle) == 1
    side.close()


def test_the_last_thread_is_for_jobs_that_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: a prompt that was stopped there is encoded in another thread."""
    threads, gate, now, stopped = PromptThreads(4), threading.Event(), [0.0], list[str]()
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("minisgl.server.workers.prompt_threads.time", clock)

    def encode(msg: TokenizeMsg) -> UserMsg | ErrorReply:
        if msg.client != "quick" and (left := threads.limit(10.0)) < 10.0:
            stopped.append(msg.client)
            now[0] += left
            return ErrorReply(uid=msg.uid, message="messages: must render within 10 seconds")
        if msg.client != "quick":
            gate.wait(60)
        return UserMsg(msg.uid, [1])

    def turn() -> list[int]:
        done = threads.take(encode)
        wait([job.result for job in threads._jobs.values() if job.hurried])
        assert all(isinstance(made, UserMsg) for made in done)
        return [made.uid for made in done]  # type: ignore[union-attr]

    clients = [*(f"slow {number}" for number in range(6)), "quick"]
    for uid, client in enumerate(clients):
        threads.add(TokenizeMsg(uid=uid, messages=[*CHAT], client=client))
    try:
        assert [uid for _ in range(6) for uid in turn()] == [6]
        assert stopped == ["slow 3", "slow 4", "slow 5"]
        threads.add(TokenizeMsg(uid=7, messages=[*CHAT], client="quick"))
        threads.drop(4)  # a client that leaves meanwhile
        assert [*turn(), *turn()] == [7]
        now[0] += 61.0  # forgotten, and stopped again
        assert [*turn(), *turn(), *turn()] == [] and stopped[3:] == ["slow 3", "slow 5"]
    finally:
        gate.set()
    rest = set[int]()
    while threads.waiting:
        rest |= {*turn()}
    assert rest == {0, 1, 2, 3, 5} and len(stopped) == 5


def test_the_start_of_a_process_is_not_the_fault_of_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, now, hurried = PromptThreads(2), [0.0], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("minisgl.server.workers.prompt_threads.time", clock)

    def encode(msg: TokenizeMsg) -> UserMsg | ErrorReply:
        if msg.client == "first":
            hurried.wait(60)
        else:
            now[0] += 5.0  # a process starts
        assert threads.limit(10.0) == (10.0 if msg.client == "first" else 0.5)
        return ErrorReply(uid=msg.uid, message="messages: no")

    for uid, client in enumerate(("first", "second")):
        threads.add(TokenizeMsg(uid=uid, messages=[*CHAT], client=client))
    for _ in range(2):
        done = threads.take(encode)
        wait([job.result for job in threads._jobs.values() if job.hurried])
    hurried.set()
    assert [made.uid for made in done] == [1] and not threads._slow  # type: ignore[union-attr]


def test_short_jobs_do_not_keep_long_ones_from_the_other_threads() -> None:
    """Each job that ends leaves one thread free, and never two."""
    threads, gates = PromptThreads(4), [threading.Event() for _ in range(9)]

    def encode(msg: TokenizeMsg) -> UserMsg:
        return UserMsg(msg.uid, [int(gates[msg.uid].wait(60))])

    for uid in range(4):
        threads.add(TokenizeMsg(uid=uid, text="short", client=f"{uid}"))
    try:
        threads.take(encode)
        assert [job.hurried for job in threads._jobs.values()] == [False] * 3 + [True]
        threads.add(TokenizeMsg(uid=4, text="x" * (LONG_TEXT + 1), client="long"))
        for uid in range(5, 8):
            threads.add(TokenizeMsg(uid=uid, text="short", client=f"{uid}"))
        gates[3].set()
        wait([threads._jobs[3].result])
        threads.take(encode)
        assert 5 in threads._jobs  # the last thread is not for the long prompt
        gates[1].set()
        wait([threads._jobs[1].result])
        threads.take(encode)
        assert 4 in threads._jobs and not threads._jobs[4].hurried
    finally:
        for gate in gates:
            gate.set()


def test_long_texts_are_encoded_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 4,096 tokens has no use for a million characters; more only for a larger one."""
    jobs = list[tuple[Any, ...]]()
    monkeypatch.setattr(Side, "call", lambda side, *job: jobs.append(job) or [7])
    tokenizer = SideTokenizer(FOLDER)
    want = len(tokenizer.ids_of("a" * 2**20, False))
    assert want > 1 and not jobs
    assert tokenizer.ids_of("a" * (2**20 + 1), True) == [7]
    assert jobs == [("encode", "a" * (2**20 + 1), True)]
    config = replace(ModelConfig.from_path(FOLDER), rotary=RotaryConfig(64, 1e4, 2**18))
    monkeypatch.setattr(ModelConfig, "from_path", lambda path: config)
    assert len(SideTokenizer(FOLDER).ids_of("a" * 2**20 + "a", False)) >= want


def test_the_error_of_a_template_is_short() -> None:
    side = side_of("{{ raise_exception('no ' * 1000000) }}")
    with pytest.raises(RuntimeError, match=r"^no no") as caught:
        side.call("render", CHAT, OPEN)
    assert len(str(caught.value)) == 1000
    side.close()


def test_the_time_of_a_thread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts that take long do not come before all longer texts that take no time."""
    threads, now, order = PromptThreads(1), [0.0], list[str]()
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("minisgl.server.workers.prompt_threads.time", clock)
    for uid in range(8):
        client = "slow" if uid < 4 else "fast"
        chat = [{"role": "user", "content": "x" * (10 if uid < 4 else 1000)}]
        threads.add(TokenizeMsg(uid=uid, messages=chat, client=client))

    def encode(msg: TokenizeMsg) -> UserMsg:
        order.append(msg.client)
        return UserMsg(msg.uid, [1])

    while threads.waiting:
        threads.take(encode)
        wait([job.result for job in threads._jobs.values()])
        now[0] += 5.0 * any(job.same[0].client == "slow" for job in threads._jobs.values())
    assert order[-2:] == ["slow"] * 2 and order.index("fast") < 4


def test_one_client_occupies_half_of_the_threads() -> None:
    threads, gate, begun = PromptThreads(4), threading.Event(), list[int]()

    def encode(msg: TokenizeMsg) -> UserMsg:
        begun.append(msg.uid)
        gate.wait(60)
        return UserMsg(msg.uid, [1])

    for uid in range(8):
        client = "greedy" if uid < 7 else "other"
        threads.add(TokenizeMsg(uid=uid, messages=[*CHAT], client=client))
    try:
        threads.take(encode)
        assert sorted(threads._jobs) == [0, 1, 7]
        threads.drop(0)  # its client has left, and its thread is still occupied
        threads.take(encode)
        assert sorted(threads._jobs) == [0, 1, 7]
    finally:
        gate.set()
    done = list[Any]()
    while threads.waiting:
        done += threads.take(encode)
    assert sorted(msg.uid for msg in done) == list(range(1, 8))


def test_others_are_answered_while_a_chat_is_rendered(
    started: Started, tmp_path: Path, rendering: list[SideProcess]
) -> None:
    """By a server whose template has no end for some; then the side process dies."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(
        "{% if 'endless' in messages[0].content %}" + LOOPS + "{% endif %}Hi"
    )
    config = ServerConfig(model_path=str(folder), device="cpu", page_size=4, num_pages=200)
    params = SamplingParams(max_tokens=4, ignore_eos=True)

    async def ask(server: InProcessServer) -> None:
        async def answer(client: str, messages: Any) -> int:
            count = 0
            replies = server.frontend.generate(params, client=client, messages=messages)
            async for reply in replies:
                count = reply.completion_tokens
            return count

        await server.frontend.start()
        endless = [asyncio.ensure_future(answer("greedy", [*ENDLESS])) for _ in range(9)]
        await asyncio.sleep(0)
        assert await answer("other", CHAT) == 4
        assert not any(task.done() for task in endless)
        for task in endless[2:]:
            task.cancel()
        await asyncio.wait(endless[2:])
        while len(rendering) < 3:
            await asyncio.sleep(0.01)
        for process in started():
            process.kill()
        for task in endless[:2]:
            with pytest.raises(RequestFailed, match=r"^messages: must render") as caught:
                await task
            assert caught.value.param == "messages"
        assert await answer("greedy", CHAT) == 4
        await server.frontend.stop()

    with InProcessServer(config) as server:
        server._tokenizer.side._seconds = 600.0
        asyncio.run(ask(server))
    assert not started()


def test_an_llm_has_the_same_deadlines(started: Started) -> None:
    with LLM(device="cpu", page_size=4, num_pages=100) as llm:
        assert llm.tokenizer is not None
        assert llm.chat(CHAT, SamplingParams(max_tokens=2))[0]["prompt_tokens"]
        llm.tokenizer.side._seconds = 0.0
        for call in (lambda: llm.chat(LONG), lambda: llm.generate("Hi", SLOW)):
            with pytest.raises(ValueError, match=r"must (render|compile) within 0 seconds"):
                call()
    assert not started()
