"""The engine as a Python object: prompts in, dictionaries out.

Generated from notebooks/09c_llm.ipynb: edit there.
"""

from __future__ import annotations

import difflib
import importlib
import numbers
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minisgl.config.engine import SchedulerConfig
from minisgl.config.model import sampling_advice
from minisgl.config.paths import resolve_model_path
from minisgl.config.rules import refuse
from minisgl.core import IntArray, SamplingParams
from minisgl.guarded import guarded
from minisgl.recording import Recorder
from minisgl.scheduler.build import build_scheduler, limits_of
from minisgl.scheduler.channel import InProcessChannel
from minisgl.scheduler.messages import (
    AbortMsg,
    ErrorReply,
    ExitMsg,
    InvalidRequestError,
    TokenReply,
    UserMsg,
)
from minisgl.scheduler.side import SideTokenizer
from minisgl.tokenizer import DecodeStatus, Tokenizer, has_tokenizer


class OutputBuilder:
    """Output of one request so far; text only if there is a tokenizer."""

    def __init__(
        self, prompt_ids: IntArray, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.status: DecodeStatus | None = None
        if tokenizer is not None:
            stop, spare = tuple(params.stop), params.spare_thoughts
            self.status = DecodeStatus(tokenizer, prompt_ids.tolist(), stop, spare)
        self.done = False
        self.logprobs: list[dict[str, Any]] | None = None if params.logprobs is None else []
        self.out: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "finish_reason": None,
            "prompt_tokens": len(prompt_ids),
            "cached_tokens": 0,
        }

    def push(self, reply: TokenReply) -> bool:
        """Add a reply; return True if a stop string ended the text, so that the rest is dropped."""
        self.out["cached_tokens"] = reply.cached_tokens
        if reply.notice is not None:
            self.out["notice"] = reply.notice
        if reply.prompt_logprobs is not None:
            names, scores = ("token_id", "logprob", "top_logprobs"), reply.prompt_logprobs.part()
            self.out["prompt_logprobs"] = [dict(zip(names, told)) for told in scores]
        if reply.token is not None:
            self.out["token_ids"].append(reply.token)
            if self.logprobs is not None:
                chosen = {"token_id": reply.token, "logprob": reply.logprob}
                self.logprobs.append(chosen | {"top_logprobs": reply.top_logprobs or []})
        if self.status is not None:
            self.out["text"] += self.status.take(reply.token, reply.finish_reason)
        if self.status is not None and self.status.stopped:
            self.close("stop")
            return not reply.finished
        if reply.finished:
            self.close(reply.finish_reason)
        return False

    def close(self, reason: str | None) -> None:
        """Close the output: set its finish reason and log probabilities."""
        self.done = True
        self.out["finish_reason"] = reason
        if self.logprobs is not None:
            self.out["logprobs"] = self.logprobs


Prompt = str | Sequence[int] | IntArray
Messages = Sequence[Mapping[str, Any]]


def as_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt or several as a list; a string or a flat list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    array = hasattr(prompts, "__array__")  # NumPy's, and torch's
    if (array and np.ndim(prompts) == 0) or not (array or isinstance(prompts, Sequence)):
        raise refuse("prompts", "text, token ids or a list of them", prompts)
    first = next(iter(prompts), None)  # its ids may be NumPy's
    single = np.ndim(prompts) == 1 if array else isinstance(first, numbers.Integral)
    return [prompts] if single else list(prompts)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, from one or a list of equal length."""
    if isinstance(params, SamplingParams):
        return [params] * count
    listed = list(params) if isinstance(params, Iterable) else [params]
    if isinstance(params, Mapping) or not all(isinstance(p, SamplingParams) for p in listed):
        raise refuse("sampling_params", "SamplingParams or a list", params)
    if len(listed) != count:
        raise ValueError(f"sampling_params: {count} prompts need {count}, got {len(listed)}")
    return listed


def advised_params(folder: Path) -> SamplingParams:
    """Return the sampling defaults of a model's `generation_config.json`; greedy without one."""
    try:
        return SamplingParams(**sampling_advice(folder))
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None


def make_config(folder: Path, ranks: int | None, fields: dict[str, Any]) -> SchedulerConfig:
    """Make a config from keyword arguments; accept `torch.device` and `torch.dtype`."""
    if ranks is not None and fields.setdefault("tp", ranks) != ranks:
        raise ValueError(f"tensor_parallel_size: {ranks} beside tp {fields['tp']}; give one")
    for name in fields.keys() & {"device", "dtype"}:
        fields[name] = str(fields[name]).removeprefix("torch.")
    known = SchedulerConfig.__dataclass_fields__
    for name in fields.keys() - known.keys():
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        raise TypeError(f"LLM got an unexpected keyword argument {name!r}; {hint}")
    return SchedulerConfig(model_path=str(folder), **fields)


def start_ranks(config: SchedulerConfig) -> Any:
    """Start the other ranks as processes (chapter 10b); return None if there are none."""
    if config.tp.size == 1:
        return None
    return importlib.import_module("minisgl.runtime.ranks").Ranks(config)


class LLM:
    """A model that answers in this process. Prefixes stay cached from one call to the next.

    `model_path` is a folder, a hub id, or None for the embedded model. All other fields of
    `SchedulerConfig` may be given by name; `tensor_parallel_size` is `tp`: with more than one rank,
    this process is rank 0 and starts the others; a failure ends them, and the object with them.
    `record` is a file for the run's events (chapter 02c), `record_text` adds the prompts.
    """

    def __init__(
        self, model_path: str | Path | None = None, *, tensor_parallel_size: int | None = None,
        progress: bool = False, record: str | Path | None = None, record_text: bool = False,
        **fields: Any,
    ) -> None:  # fmt: skip
        folder = resolve_model_path(model_path)
        self.config = make_config(folder, tensor_parallel_size, fields)
        self.tokenizer = SideTokenizer(folder) if has_tokenizer(folder) else None
        self.channel = InProcessChannel()
        self.recorder = Recorder(Path(record), text=record_text) if record is not None else None
        self.ranks = start_ranks(self.config)
        alone = self.ranks is None
        parts = (self.channel,) if alone else (self.ranks.channel(self.channel), self.ranks.comm)
        try:
            self.scheduler = build_scheduler(
                self.config, *parts, progress=progress, recorder=self.recorder
            )
        except BaseException:
            if self.recorder is not None:
                self.recorder.close()
            if not alone:
                self.ranks.give_up()
            raise
        self.limits = limits_of(self.scheduler.engine, self.scheduler.eos_token_ids)
        self.default_params, self.pid = advised_params(folder), os.getpid()
        self.next_uid, self.closed, self.dirty = 0, False, False  # dirty: in a call, or it failed
        self.lock = threading.Lock()  # threads may share the object; their calls take turns

    def encode(
        self, index: int, prompt: Prompt, params: SamplingParams
    ) -> tuple[IntArray, SamplingParams]:
        """Return prompt number `index` and its parameters in ids; raise ValueError if invalid."""
        try:
            if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
                what = "text" if isinstance(prompt, str) else "stop strings"
                raise InvalidRequestError(f"{what}: {self.config.model_path} has no tokenizer")
            ids: Any = prompt
            if self.tokenizer is not None:
                params = self.tokenizer.encode_params(params)
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            req = self.scheduler.make_req(UserMsg(0, ids, params))
            return req.input_ids, params
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from None

    def generate(
        self,
        prompts: str | Sequence[int] | IntArray | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[dict[str, Any]]:
        """Answer prompts, all at once; return a dictionary for each, in their order.

        Without sampling parameters, `default_params` apply: the model's defaults.
        Keys: text, token_ids, finish_reason ("stop" or "length"), prompt_tokens, cached_tokens;
        logprobs, prompt_logprobs if asked for; notice if `max_tokens` was clamped, or the cause of
        an "abort". ValueError for the first prompt that cannot be answered, before anything runs.
        """
        if os.getpid() != self.pid:
            why = "a fork copies no threads; make it in the child, or start the process by 'spawn'"
            raise RuntimeError(f"this LLM was made in another process: {why}")
        listed = as_prompts(prompts)
        given = self.default_params if sampling_params is None else sampling_params
        params = as_params(given, len(listed))
        encoded = [self.encode(index, *pair) for index, pair in enumerate(zip(listed, params))]
        return self.answer_all(encoded, progress)

    def answer_all(
        self, encoded: list[tuple[IntArray, SamplingParams]], progress: bool
    ) -> list[dict[str, Any]]:
        """Run the scheduler until all prompts are answered; an exception resets it."""
        outputs = [OutputBuilder(*pair, self.tokenizer) for pair in encoded]
        with self.lock:
            if self.dirty and not self.closed:
                self.recover()
            if self.closed:
                raise RuntimeError("this LLM was shut down; make a new one")
            uids = range(self.next_uid, self.next_uid + len(outputs))
            self.next_uid, self.dirty = uids.stop, True
            try:
                self.channel.put_messages(
                    *(
                        UserMsg(uid, ids.tolist(), params)
                        for uid, (ids, params) in zip(uids, encoded)
                    )
                )
                with tqdm(total=len(outputs), desc="requests", disable=not progress) as bar:
                    self.run_until_done(dict(zip(uids, outputs)), bar)
            except BaseException:
                self.recover()
                raise
            self.dirty = False
        return [output.out for output in outputs]

    def run_until_done(self, outputs: dict[int, OutputBuilder], bar: tqdm) -> None:
        """Step and add each reply to its output; abort a request whose text has a stop string."""
        step = self.scheduler.step_overlap if self.scheduler.overlap else self.scheduler.step
        while self.channel.waiting or self.scheduler.has_work:
            step()
            for reply in self.channel.take_replies():
                if isinstance(reply, ErrorReply):
                    raise RuntimeError(f"uid {reply.uid}: {reply.message}")
                output = outputs[reply.uid]
                if output.done:
                    continue
                if output.push(reply):
                    self.channel.put_messages(AbortMsg(reply.uid))
                bar.update(output.done)

    def recover(self) -> None:
        """Forget all requests, messages and prefixes; end other ranks, which may be waiting."""
        if self.ranks is not None:
            self.end(failed=True)
            return
        self.scheduler.reset()
        self.channel.recv(block=False)
        self.channel.take_replies()
        self.dirty = False

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Answer one conversation, or a list of them; each is a list of role and content.

        The prompt has the `tools`; calls stay in the text as the model wrote them, because only the
        server parses them. `chat_template_kwargs` are variables of its chat template.
        """
        if self.tokenizer is None:
            raise ValueError(f"messages: {self.config.model_path} has no tokenizer")
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise refuse("messages", "a list of role and content", messages)
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        talks: Sequence[Any] = [messages] if single else messages
        variables = {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}
        prompts = [self.tokenizer.apply_chat(talk, **variables) for talk in talks]
        return self.generate(prompts, sampling_params, progress=progress)

    def shutdown(self) -> None:
        """Wait for the device and free the engine with its memory; a second call does nothing."""
        with self.lock:
            if self.dirty and not self.closed:
                self.recover()
            if not self.closed:
                self.end()

    def end(self, failed: bool = False) -> None:
        """Leave with all ranks; after a failure, without them. Raise WorkerFailed if one failed."""
        self.closed = True
        try:
            if failed:
                self.ranks.explain()
            else:
                self.channel.put_messages(ExitMsg())
                self.scheduler.run()
        except BaseException:
            failed = True
            raise
        finally:
            shutdown = self.scheduler.engine.shutdown
            if failed and self.ranks is not None:
                self.ranks.give_up(shutdown)
            else:
                with suppress(*[RuntimeError] * failed):  # the GPU itself may have failed
                    shutdown()
            if self.recorder is not None:
                guarded(self.recorder.close)()
            if self.tokenizer is not None:
                self.tokenizer.side.close()
            if not failed and self.ranks is not None:
                self.ranks.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
