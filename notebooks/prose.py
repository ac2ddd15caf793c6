"""The book's English: rules for text, docstrings and messages, checked by `build.py check`.

Docstrings of functions begin with a verb in the imperative, those of classes and modules with a
noun. Verbs of speech and will belong to people, and the field's terms replace private words.
`python notebooks/prose.py [FOLDER]` prints every hit of a tree and the count of each rule.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    Abort Accept Add Admit Advance Allocate Answer Append Apply Approximate Arm Assemble Attend
    Begin Blend Bring Build Cache Call Capture Chat Check Choose Close Collect Combine Compare
    Compile Complete Compute Concatenate Connect Convert Copy Count Create Cut Decode Decorate
    Define Delete Dequantize Describe Detect Detokenize Divide Do Draw Drop Empty Encode End
    Estimate Evaluate Evict Execute Exit Expand Export Fail Feed Fill Filter Find Finish Fold Follow
    Forbid Forget Fork Format Free Gather Generate Go Handle Hold Import Indent Initialize
    Insert Interrupt Join Keep Kill Launch Lay Leave Limit List Load Log Loop Make Map Mark Mask
    Match Measure Merge Move Multiply Name Note Open Order Overlap Pack Pair Parse Pass Plan
    Poll Prefetch Prepare Print Probe Process Prompt Propose Protect Put Quantize Queue Raise
    Rank React Read Receive Record Recount Refuse Register Reject Remember Remove Render Repeat
    Replace Replay Report Request Require Resolve Respond Retract Return Rotate Route Run Sample
    Scramble Search Select Send Separate Serve Set Settle Share Shift Show Shut Skip Sort Spell
    Split Start Step Stop Store Sum Summarize Synthesize Take Terminate Time Train Translate
    Turn Unlock Unmap Update View Wait Warn Wrap Write Yield Zero
    """,
    )
)
RULES = tuple(
    (re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), write)
    for pattern, write in (
        (r"\b(?:tells?|told)\b", "shows, returns, sends, is given"),
        (r"\b(?:says|said)\b", "shows, states, returns, is"),
        (r"(?<!you\W)(?<!we\W)\bknows?\b", "has, stores, supports"),
        (r"(?<!you\W)(?<!we\W)(?<!one\W)\bwants?\b", "needs, requires, expects"),
        (r"(?<!you\W)\b(?:believes?|complains?|hears?)\b", "name the action"),
        (r"\bnobody\b", "name the part: no request, no rank, is never read"),
        (r"\bfor ever\b", "indefinitely; never returns"),
        (r"\b(?:of|by|from|with|holds|has|in) so many \w+\b(?! that)", "the number by its name"),
        (r"\bwe made? up\b", "made-up"),
        (r"\*\* Let `|\bLet us\b", "make `x` do …, or the imperative"),
        (r"\blets? go of\b", "releases"),
        (r"\bdraws? (?:a|the|one|its|another|the same) tokens?\b", "sample"),
        (r"\b(?:drawn|draws) (?:again|twice)\b", "sampled again"),
        (r"\b(?:the|a|each|second|one) draw\b", "the sample, sampling"),
        (r"\brecorded (?:decode |prefill )?(?:steps?|prefills?|graphs?|sizes?)\b", "captured"),
        (r"\b(?:weights?|checkpoints?|pool|experts?|queries|activations) of eight bits\b", "FP8"),
        (r"\bis (?:not )?(?:its|the \w+'s) business\b", "the part that does it"),
    )
)
PERSON = re.compile(r"(?:What|How|Whether|Who|Why|Where|When)\b")
# Hits that are right as they are: the words around the hit, and the reason.
EXCEPTIONS = (
    "says [vLLM",  # quotes of users
    'says "hello"',  # a user
    "Tell me a story",  # prompts
    "a story, tell it",
)
FENCE = re.compile(r"^(```+|~~~+)(.*?)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
UNREAD = re.compile(r"`[^`\n]*`|\]\([^)\s]*\)|https?://\S+|\$[^$\n]*\$")
UNWRITTEN = "A_"  # the chapter whose strings are a model's training data


class Hit(NamedTuple):
    """A place that breaks a rule."""

    path: str
    line: int
    words: str
    write: str

    def __str__(self) -> str:
        """Format the hit as `file:line: words: advice`."""
        return f"{self.path}:{self.line}: {self.words!r}: write {self.write}"


def search(path: str, text: str, line: int) -> Iterator[Hit]:
    """Yield the hits of all rules in a text that begins at `line`."""
    plain = UNREAD.sub(lambda m: blanked(m[0]), text)
    for pattern, write in RULES:
        for found in pattern.finditer(plain):
            start, end = found.span()
            if not any(is_excepted(text, start, end, words) for words in EXCEPTIONS):
                hit = " ".join(text[start:end].split())
                yield Hit(path, line + text.count("\n", 0, start), hit, write)


def is_excepted(text: str, start: int, end: int, words: str) -> bool:
    """Return True if text[start:end] lies in, or beside, these words of an exception."""
    return words in " ".join(text[max(0, start - len(words)) : end + len(words)].split())


def blanked(text: str) -> str:
    """Replace code by `x`s and addresses by spaces, keeping length and line breaks."""
    if text.startswith("`"):
        return f"`{'x' * (len(text) - 2)}`"
    return re.sub(r"[^\n]", " ", text)


def search_docstring(path: str, node: ast.AST, line: int) -> Iterator[Hit]:
    """Yield the hits of a definition's docstring: its first word, then the rules of text."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return
    doc = ast.get_docstring(node)
    if not doc or not doc.strip():
        return
    place = line + getattr(node.body[0], "lineno", 1) - 1
    first = doc.split()[0].rstrip(".,:;")
    if isinstance(node, ast.ClassDef | ast.Module):
        if PERSON.match(doc):
            yield Hit(path, place, first, "a noun phrase, what the thing is")
    elif first not in VERBS and not is_noun(node):
        yield Hit(path, place, first, "an imperative first, or add the verb to notebooks/prose.py")
    yield from search(path, doc, place)


def is_noun(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a property or a context manager, whose docstring may be a noun phrase."""
    marks = [ast.unparse(mark).split("(")[0].split(".")[-1] for mark in node.decorator_list]
    return not {"property", "cached_property", "contextmanager", "asynccontextmanager"}.isdisjoint(
        marks
    )


def search_code(path: str, source: str, line: int, messages: bool = True) -> Iterator[Hit]:
    """Yield the hits of docstrings and, with `messages`, of strings of three words or more."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a draft or a magic
        return
    docs: set[int] = set()
    for node in ast.walk(tree):
        yield from search_docstring(path, node, line)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            docs.add(id(body[0].value))
    for node in ast.walk(tree) if messages else ():
        if not isinstance(node, ast.Constant) or id(node) in docs:
            continue
        if isinstance(node.value, str) and len(node.value.split()) > 2:
            yield from search(path, node.value, line + node.lineno - 1)


def search_markdown(path: str, source: str) -> Iterator[Hit]:
    """Yield the hits of a page: its text, and the docstrings and messages of exported cells."""
    yield from search(path, FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source), 1)
    for fence in FENCE.finditer(source):
        options = re.match(r"(?::[^\n]*\n)*", fence[3])
        code = fence[3][options.end() if options else 0 :]
        if "code-cell" in fence[2] and re.match(r"\s*(#\|[^\n]*\n)*#\| export", code):
            line = 1 + source.count("\n", 0, fence.end() - len(code) - len(fence[1]) - 1)
            written = not Path(path).name.startswith(UNWRITTEN)
            yield from search_code(path, code, line, messages=written)


def find_hits(root: Path, files: Sequence[Path] | None = None) -> list[Hit]:
    """Search `files`, or all: chapters, README, the site's first page, and notebooks/*.py."""
    if files is None:
        folder = root / "notebooks"
        files = [
            *folder.glob("*.md"),
            *folder.glob("*.py"),
            root / "README.md",
            root / "book/intro.md",
        ]
    hits: list[Hit] = []
    for file in filter(Path.exists, files):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        if file.suffix == ".py":
            hits += search_code(name, text, 1, messages=file.name != Path(__file__).name)
        else:
            hits += search_markdown(name, text)
    return sorted(set(hits))


def main(folder: str = ".") -> int:
    """Print every hit of a tree and the count of each rule; return 1 if there is any."""
    hits = find_hits(Path(folder).resolve())
    print(*hits, sep="\n")
    for write, count in Counter(hit.write for hit in hits).most_common():
        print(f"{count:5} {write}")
    print(f"{len(hits):5} in all")
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
