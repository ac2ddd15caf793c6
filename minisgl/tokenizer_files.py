"""A tokenizer from its files, and the templates that render chats for it.

Generated from notebooks/06b_tokenizer.ipynb: edit there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.config.paths import read_json
from minisgl.template_files import chat_templates


@dataclass(frozen=True)
class TokenizerFiles:
    """The definitions in a folder's files, from either reader."""

    backend: Any  # a `tokenizers.Tokenizer`
    special_tokens: Mapping[str, str]  # by name: bos_token, eos_token, …
    templates: Mapping[str, str]  # by name; "default" is the usual one


AS_THEY_ARE = {"PreTrainedTokenizer", "TokenizersBackend", "Qwen2Tokenizer"}  # classes


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a `tokenizer_config.json` by name."""
    extra = config.get("extra_special_tokens")
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def expected_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield every token that the config mentions, and whether it is a special one."""
    for token in named_tokens(config).values():
        yield token, True
    for name in ("extra_special_tokens", "additional_special_tokens"):
        listed = config.get(name)
        for token in listed if isinstance(listed, list) else ():
            yield (token["content"] if isinstance(token, dict) else token), True
    for token in config.get("added_tokens_decoder", {}).values():
        yield token["content"], token.get("special", False)


def read_directly(folder: Path) -> TokenizerFiles | None:
    """Read the two files; return None if they do not define this tokenizer completely."""
    config = read_json(folder / "tokenizer_config.json", required=False)
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    model = str(read_json(folder / "config.json", required=False).get("model_type"))
    old = [folder / "special_tokens_map.json", folder / "added_tokens.json"]
    if "added_tokens_decoder" not in config and any(file.is_file() for file in old):
        return None
    if any(config.get(name) for name in ("auto_map", "add_prefix_space", "split_special_tokens")):
        return None
    if not (folder / "tokenizer.json").is_file() or "mistral" in model:
        return None  # transformers mends the splitting rules of Mistral's older files
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    byte_level = "ByteLevel" in str(backend.pre_tokenizer)
    if kind not in AS_THEY_ARE and not (kind == "LlamaTokenizer" and byte_level):
        return None
    added = {(t.content, t.special) for t in backend.get_added_tokens_decoder().values()}
    if not added.issuperset(expected_tokens(config)):
        return None
    return TokenizerFiles(backend, named_tokens(config), chat_templates(folder))


def read_by_transformers(folder: Path) -> TokenizerFiles:
    """Read a folder of any format that the library supports."""
    from transformers import AutoTokenizer  # seconds, which most models do not need

    found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("no tokenizer.json that can be used")
    return TokenizerFiles(backend, found.special_tokens_map, chat_templates(folder))


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read a tokenizer and turn off truncation and padding; ValueError if it cannot be read."""
    try:
        files = read_directly(folder) or read_by_transformers(folder)
    except Exception as error:  # the libraries may raise any error for a broken file
        raise ValueError(f"tokenizer: {folder} cannot be read: {error!r}") from error
    if not is_plain(decoder := files.backend.decoder):
        why = "it may hold neither a regex nor a replacement that is longer than its pattern"
        raise ValueError(f"tokenizer: {folder}: decoder: {why}, got {decoder!s:.200}")
    files.backend.no_truncation()
    files.backend.no_padding()
    return files


LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3_WORDS += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
TEKKEN_WORDS += r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Mistral's
EMBEDDED_WORDS = r'\{"|":|",|"\}|\["|"\]|\}\}|\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]'
KNOWN_WORDS = {LLAMA3_WORDS, QWEN2_WORDS, TEKKEN_WORDS, EMBEDDED_WORDS}
PLAIN = {"Sequence", "NFC", "Lowercase", "Prepend", "Digits", "ByteLevel", "Metaspace", "Strip"}
PLAIN |= {"TemplateProcessing", "ByteFallback", "Fuse", "WordPiece", "BPEDecoder"}


def is_plain(part: Any) -> bool:
    """Return True if the rules of a normalizer, decoder … are quick and add little text."""
    text, rules = part.__getstate__().decode() if part else "{}", list[dict[str, Any]]()
    json.loads(text, object_hook=lambda rule: rules.append(rule) or rule)  # type: ignore[func-returns-value]
    kinds = [rule["type"] for rule in rules if "type" in rule and "pattern" not in rule]
    once = len(kinds) == len(set(kinds)) and text.count('"A"') < 3  # the prompt in a template
    few = text.count('"pattern"') <= 2 and '{"String":""}' not in text and len(text) < 2**12
    added = [rule.get("content", rule.get("prepend", "")) for rule in rules]
    taken = [rule.get("pattern", {"String": " "}).get("String", "") for rule in rules]
    grows = any(len(new) > len(old) for new, old in zip(added, taken, strict=True))
    known = KNOWN_WORDS.issuperset(rule["Regex"] for rule in rules if "Regex" in rule)
    return known and once and few and not grows and PLAIN.issuperset(kinds)


def has_plain_rules(backend: Any) -> bool:
    """Return True if all rules that run for a prompt are plain."""
    model, tokens = backend.model, backend.get_added_tokens_decoder().values()
    odd = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    usual = type(model).__name__ == "BPE" and not any(getattr(model, name) for name in odd)
    strip = [t.content for t in tokens if t.lstrip or t.rstrip]  # white space beside them
    strip += [backend.normalizer.normalize_str(text) for text in strip if backend.normalizer]
    rules = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    return usual and all(map(str.strip, strip)) and all(map(is_plain, rules))


class Generation(Extension):
    """The tag `generation`, which marks text for training and does not change it."""

    tags = {"generation"}  # noqa: RUF012  (in the base it is no ClassVar)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the nodes between the two tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def refuse_chat(message: str) -> None:
    """Reject a conversation with the template's message."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON as in a model's training data; Jinja's own filter escapes it for HTML."""
    spelling: dict[str, Any] = {"indent": indent, "separators": separators}
    return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys, **spelling)


def sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment that templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse_chat
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


END = "\ue000"  # for private use: not in training texts
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one field


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without nulls, its thoughts under each name that a template may read."""
    found = {name: value for name, value in message.items() if value is not None}
    thoughts = [found[name] for name in THOUGHTS if name in found]
    missing = [name for name in ("thinking", "reasoning_content") if name not in found]
    return {**{name: thoughts[0] for name in missing if thoughts}, **found}


class ChatTemplates:
    """The chat templates of a model; each is compiled when it is first used."""

    def __init__(self, texts: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.texts, self.special_tokens = texts, special_tokens
        self._compiled: dict[str, jinja2.Template] = {}

    def choose(self, tools: bool) -> str:
        """Return the name of the template for a chat with or without tools; ValueError if none."""
        if not self.texts:
            raise ValueError("messages: this model's tokenizer has no chat template")
        if tools and "tool_use" in self.texts:
            return "tool_use"
        if "default" not in self.texts:
            raise ValueError(f"messages: no default among the templates {', '.join(self.texts)}")
        if tools and "tools" not in self.texts["default"]:
            raise ValueError("tools: this model's chat template has none")
        return "default"

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool,
        continue_final_message: bool = False, tools: Sequence[Any] | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """Return a conversation as one string, ready for its answer or open in its last message."""
        if continue_final_message and add_generation_prompt:
            raise ValueError("add_generation_prompt: not together with continue_final_message")
        name = self.choose(bool(tools))
        if name not in self._compiled:
            self._compiled[name] = sandbox().from_string(self.texts[name])
        chat = [plain_message(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] += END + " "
        text = self._compiled[name].render(
            messages=chat, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens, **variables},
        )  # fmt: skip
        if not continue_final_message:
            return text
        before, mark, after = text.rpartition(END)
        if not mark:
            raise ValueError("continue_final_message: the template leaves the last message out")
        return before if after.startswith(" ") else before.rstrip()
