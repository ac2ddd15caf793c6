"""Held-out accuracy of any generator: every task, every depth of a list, new phrasings.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import torch

from minisgl.config.paths import resolve_model_path
from training.chats import as_messages, system_prompt, toolless_turn
from training.checkpoint import load_model
from training.data import TASKS, Phrasing, Turn, draw
from training.lookup import Table, make_table, query, with_table
from training.phrases import is_held_out
from training.records import draw_json, read_text
from training.stories import is_story
from training.talk import draw_strange, small_talk
from training.tools import Message, call_turn, some_tools

Generate = Callable[[list[list[int]]], list[list[int]]]  # prompts to new tokens
CountTokens = Callable[[str], int]
DEPTHS = 10
MAX_NEW_TOKENS = 800
NEW: tuple[Phrasing, Phrasing] = ("new pair", "new phrasing")


@dataclass(frozen=True)
class Case:
    """One conversation that ends with a question, and the required answer."""

    name: str  # its row of the table
    messages: list[Message]  # the first may hold the tools
    turn: Turn

    def accepts(self, text: str) -> bool:
        """Return True if `text` equals the answer; a story must be whole and about its subject."""
        if self.turn.task == "story":
            return is_story(text, self.turn.key.removeprefix("story "))
        return text == self.turn.answer


def case(name: str, turn: Turn, before: Sequence[Turn] = (), system: str = "") -> Case:
    """Make a case that asks `turn` after some earlier turns."""
    return Case(name, as_messages([*before, turn], system)[:-1], turn)


def drawn(make: Callable[[], Turn]) -> Turn:
    """Return the first turn by `make` that belongs to the evaluation's split."""
    while True:
        turn = make()
        if is_held_out(turn.key) and not turn.given:
            return turn


def task_cases(seed: int, per_task: int) -> Iterable[Case]:
    """Yield held-out operands of each task, alone in a conversation."""
    rng = Random(f"tasks {seed}")
    for _ in range(per_task):
        for task in TASKS:
            yield case(task, draw(rng, task, held_out=True))
        yield case("json", drawn(lambda: draw_json(rng, held_out=True)))
        yield case("cannot", draw_strange(rng, held_out=True))
        yield case("talk", small_talk(rng))


def tool_cases(seed: int, per_task: int) -> Iterable[Case]:
    """Yield cases with tools: call the right one, report its result, or answer without."""
    rng = Random(f"tools {seed}")
    for _ in range(per_task):
        tools = some_tools(rng, rng.choice((1, 2, 3)))
        start: list[Message] = [{"role": "tools", "tools": [tool.schema for tool in tools]}]
        if any(tool.kinds for tool in tools):
            turn, messages = call_turn(rng, tools, held_out=True)
            yield Case("tool call", [*start, messages[0]], turn)
            told = Turn("tool result", turn.question, messages[-1]["content"])
            yield Case("tool result", start + messages[:-1], told)
        free = toolless_turn(rng, tools)
        if free.task != "story" and not free.given:
            yield Case("no tool needed", start + as_messages([free])[:-1], free)


def context_cases(seed: int, per_task: int) -> Iterable[Case]:
    """Yield the same tasks after a system prompt, and after earlier turns."""
    rng = Random(f"context {seed}")
    names = list(TASKS)
    for index in range(per_task * 3):
        turn = draw(rng, names[index % len(names)], held_out=True)
        yield case("with a system prompt", turn, system=system_prompt(rng))
    for index in range(per_task * 3):
        turn = draw(rng, names[index % len(names)], held_out=True)
        before = [draw(rng, rng.choice(names)) for _ in range(rng.randint(1, 6))]
        yield case("after other turns", turn, before)


def phrasing_cases(seed: int, per_task: int) -> Iterable[Case]:
    """Yield held-out operands in phrasings that training never uses."""
    rng = Random(f"phrasings {seed}")
    for phrasing in NEW:
        for _ in range(per_task):
            for task in TASKS:
                yield case(f"{phrasing}: {task}", draw(rng, task, held_out=True, phrasing=phrasing))
            turn = drawn(lambda phrasing=phrasing: read_text(rng, phrasing))  # type: ignore[misc]
            yield case(f"{phrasing}: json", turn)
            table = make_table(rng, rng.randint(2, 20))
            turn = query(rng, table, rng.choice(list(table.lines)), phrasing)
            yield ask_table(rng, f"{phrasing}: look up", table, turn)
            tools = [tool for tool in some_tools(rng, 4) if tool.kinds and "noun" in tool.cores]
            turn, messages = call_turn(rng, tools, held_out=True, phrasing=phrasing)
            start: list[Message] = [{"role": "tools", "tools": [tool.schema for tool in tools]}]
            yield Case(f"{phrasing}: tool call", [*start, messages[0]], turn)


def long_table(rng: Random, count_tokens: CountTokens, most_tokens: int) -> Table:
    """Sample a table of up to `most_tokens` tokens of pairs, cut from a longer one."""
    while True:
        table = make_table(rng, most_tokens // 4)
        tokens = count_tokens(table.text)
        size = int(len(table.lines) * most_tokens / tokens * 0.98)
        if tokens < most_tokens * 0.9 or not size:
            continue
        lines = dict(list(table.lines.items())[:size])
        cut = table.text.index(list(table.lines.values())[size])
        text = table.text[:cut].rstrip("\n ,;-*")
        if count_tokens(text) <= most_tokens:
            return Table(text, lines, table.word)


def ask_table(rng: Random, name: str, table: Table, turn: Turn) -> Case:
    """Make a case with one message: the table and the question of `turn`."""
    text = with_table(rng, table, turn.question)
    return case(name, Turn(turn.task, text, turn.answer, turn.key))


def lookup_cases(
    seed: int, per_depth: int, count_tokens: CountTokens, most_tokens: int = 1500
) -> Iterable[Case]:
    """Yield held-out pairs at each of ten depths of lists of up to `most_tokens` tokens."""
    rng = Random(f"look up {seed}")
    for depth in range(DEPTHS):
        done = 0
        while done < per_depth:
            table = long_table(rng, count_tokens, most_tokens)
            keys = list(table.lines)
            part = keys[len(keys) * depth // DEPTHS : len(keys) * (depth + 1) // DEPTHS]
            held_out = [key for key in part if is_held_out(f"look up {table.lines[key]}")]
            if held_out:
                turn = query(rng, table, rng.choice(held_out))
                yield ask_table(rng, f"look up, depth {depth}", table, turn)
                done += 1


def short_lookup_cases(seed: int, count: int) -> Iterable[Case]:
    """Yield held-out pairs in lists of two to thirty."""
    rng = Random(f"short look up {seed}")
    done = 0
    while done < count:
        table = make_table(rng, rng.randint(2, 30))
        turn = query(rng, table, rng.choice(list(table.lines)))
        if is_held_out(turn.key):
            yield ask_table(rng, "look up, short list", table, turn)
            done += 1


def all_cases(seed: int, per_task: int, count_tokens: CountTokens) -> list[Case]:
    """List all cases of the accuracy table."""
    return [
        *task_cases(seed, per_task),
        *tool_cases(seed, per_task),
        *short_lookup_cases(seed, per_task),
        *lookup_cases(seed, per_task, count_tokens),
        *context_cases(seed, per_task),
        *phrasing_cases(seed, max(1, per_task // 2)),
    ]


def token_counter(tokenizer: Any) -> CountTokens:
    """Return a function that counts the tokens of a text."""
    return lambda text: len(tokenizer.backend_tokenizer.encode(text).ids)


def evaluate(
    generate: Generate, tokenizer: Any, cases: Sequence[Case]
) -> tuple[dict[str, float], list[str]]:
    """Return accuracy by name of case, and a line for every wrong answer.

    `generate` maps prompts (token ids) to new tokens; the end token may be among them.
    `tokenizer` is a tokenizer from `transformers.AutoTokenizer`.
    """
    prompts = []
    for one in cases:
        tools = one.messages[0].get("tools")
        prompts.append(
            tokenizer.apply_chat_template(
                one.messages[bool(tools) :],
                tools=tools,
                add_generation_prompt=True,
                return_dict=False,
            )
        )
    marks: dict[str, list[bool]] = {}
    wrong = []
    for one, ids in zip(cases, generate(list(map(list, prompts))), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        marks.setdefault(one.name, []).append(one.accepts(text))
        if not marks[one.name][-1]:
            asked, told, right = one.messages[-1]["content"], text, one.turn.answer
            wrong.append(f"{one.name}: {asked[-160:]!r} -> {told[-160:]!r}, not {right[-160:]!r}")
    return {name: sum(seen) / len(seen) for name, seen in marks.items()}, wrong


def report(scores: dict[str, float]) -> str:
    """Format the accuracy table."""
    return "\n".join(f"{name:32s} {score:7.1%}" for name, score in scores.items())


def transformers_generate(
    model: Any, tokenizer: Any, batch_size: int = 64, max_new_tokens: int = MAX_NEW_TOKENS
) -> Generate:
    """Return a greedy generator with transformers, in batches of prompts of similar length."""
    end = tokenizer.eos_token_id

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids = {"input_ids": [prompts[index] for index in rows]}
            batch = tokenizer.pad(ids, padding_side="left", return_tensors="pt").to(model.device)
            new = model.generate(
                **batch,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=end,
                pad_token_id=tokenizer.pad_token_id,
            )
            for index, tokens in zip(rows, new[:, batch["input_ids"].shape[1] :].tolist()):
                outputs[index] = tokens[: tokens.index(end)] if end in tokens else tokens
        return outputs

    return generate


def engine_generate(folder: Path, device: str) -> Generate:
    """Return a greedy generator with our own engine."""
    from minisgl import LLM, SamplingParams

    llm = LLM(str(folder), device=device)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    return lambda prompts: [out["token_ids"] for out in llm.generate(prompts, greedy)]


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a model folder with our own engine, or with transformers as the reference."""
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate", description="Held-out accuracy of the tiny model."
    )
    parser.add_argument("--model", default=None, help="folder or hub id; none: the embedded model")
    parser.add_argument("--per-task", type=int, default=50, help="cases per task and per depth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("minisgl", "transformers"), default="minisgl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None, help="write the scores to this JSON file")
    args = parser.parse_args(argv)
    folder = resolve_model_path(args.model)
    model, tokenizer = load_model(folder, args.device)
    if args.engine == "minisgl":
        generate = engine_generate(folder, args.device)
    else:
        batch_size = 512 if args.device.startswith("cuda") else 16
        generate = transformers_generate(model, tokenizer, batch_size)
    cases = all_cases(args.seed, args.per_task, token_counter(tokenizer))
    scores, wrong = evaluate(generate, tokenizer, cases)
    print(report(scores), *wrong, sep="\n")
    if args.out:
        on_gpu = args.device.startswith("cuda")
        chip = torch.cuda.get_device_name() if on_gpu else f"CPU {platform.machine()}"
        result = {
            "command": " ".join(["python -m training.evaluate", *(argv or sys.argv[1:])]),
            "seed": args.seed,
            "engine": f"{args.engine}, float32, temperature 0",
            "hardware": chip,
            "date": date.today().isoformat(),
            "cases": len(cases),
            "scores": scores,
            "wrong": wrong,
        }
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
