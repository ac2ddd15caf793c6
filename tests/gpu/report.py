"""All proofs that need a GPU, in one command, stored as one JSON file.

`python3 -m tests.gpu.report --out OUT` runs the tests of this folder that one GPU can run, some of
them again under compute-sanitizer's memcheck, the soak, and the accuracy table; `--only` chooses
among them, and `--only ranks` runs the tests of two GPUs. The file is written after each part, and
sections that it holds already and that are not run stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minisgl.benchmark.report import circumstances, save
from minisgl.kvcache.audit import check_integrity

ROOT = Path(__file__).resolve().parents[2]
PYTEST = shlex.split(
    "-m pytest -o addopts= --noconftest -p no:cacheprovider -p tests.gpu.at_once -q"
)
STORED = ROOT / "notebooks" / "data" / "tiny_accuracy.json"
POINT = 0.01
KERNEL_FILES = ("fused", "sampler", "attention", "deterministic", "fp8", "moe")
ENGINE_FILES = ("engine", "prefill", "speculative", "structured_output")
WIDE_FILES = ("wide",)
ALONE = "sizes_keep or memory"  # tests that measure the memory of the whole GPU
NOTHING_SELECTED = 5  # pytest's status

FUSED, SAMPLER, ATTENTION, DETERMINISTIC, FP8, MOE = (
    f"tests/gpu/test_{name}_gpu.py::" for name in KERNEL_FILES
)
CHECKED = [  # at least one of each kernel, on small inputs
    *(FUSED + f"test_gemms[dtype0-{rows}-weight0]" for rows in (1, 8, 17, 48, 65, 256)),
    FUSED + "test_one_row[weight0]",
    FUSED + "test_norm",
    *(FUSED + f"test_decode[{case}]" for case in (
        "1-128-heads0", "3-64-heads3", "40-128-heads4", "130-128-heads3", "130-128-heads4",
    )),
    *(FUSED + f"test_random_decode[dtype0-5-16-{kind}]" for kind in ("turned", "normed")),
    *(FUSED + f"test_rotate_and_store[dtype0-heads1-{normed}]" for normed in (True, False)),
    FUSED + "test_model[qwen3-dtype0]",
    SAMPLER + "test_draws_are_those_of_the_oracle[2-torch.bfloat16]",
    SAMPLER + "test_filters_leave_what_kept_leaves[torch.float32]",
    ATTENTION + "test_store_kv_kernel",
    *(
        ATTENTION + f"test_backends_agree[triton-dtype0-{case}]"
        for case in ("decode", "prefill", "partial", "page 1")
    ),
    *(
        ATTENTION + f"test_tiles_of_recorded_prefill[{kind}-dtype0]"
        for kind in ("partial", "page 1")
    ),
    DETERMINISTIC + "test_gemm[sizes0-dtype0]",
    *(FP8 + f"test_gemms[dtype0-{rows}-0-size3]" for rows in (1, 8, 33)),
    *(FP8 + f"test_gemms[dtype0-{rows}-128-size3]" for rows in (1, 8, 33)),
    FP8 + "test_eight_bits_on_both_sides[65-size3]",
    FP8 + "test_rotate_and_store_eight_bits[dtype0-heads1]",
    FP8 + "test_store_kv_of_eight_bits[1]",
    *(
        FP8 + f"test_attention_over_eight_bits[8-1-64-{case}]"
        for case in ("lens1-None-FusedBackend", "lens2-extend2-TritonBackend")
    ),
    *(MOE + f"test_blocks_hold_every_pair_once[8-hot-{rows}]" for rows in (1, 300)),
    *(MOE + f"test_experts_equal_the_oracle[{rows}-hot-shape0]" for rows in (1, 64)),
    MOE + "test_one_token_equals_the_oracle[shape0-8-dtype0]",
]  # fmt: skip


def execute(command: Sequence[str], seconds: float, **env: str) -> dict[str, Any]:
    """Run a command from the root of the project: status (None: too slow), seconds, output."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **env}, timeout=seconds, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        status, output = None, raw if isinstance(raw, str) else raw.decode(errors="replace")
    print(output[-3000:], flush=True)
    took = round(time.monotonic() - start, 1)
    program = "python3" if command[0] == sys.executable else Path(command[0]).name
    rest = ["python3" if part == sys.executable else part for part in command[1:]]
    shown = shlex.join([program, *rest])  # the paths of programs are not stored
    return {"command": shown, "status": status, "seconds": took, "output": output}


def read_junit(path: Path) -> dict[str, Any]:
    """Counts of a junit file, what failed and why, what was skipped and why, the slowest."""
    if not path.is_file():
        return {"tests": 0, "failures": {}, "skipped": {}}
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures, skipped = {}, Counter[str]()
    files: Counter[str] = Counter()
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        files[case.get("classname", "").rpartition(".")[2]] += 1
        for child in case:
            if child.tag in ("failure", "error"):
                failures[name] = (child.get("message") or "")[:500]
            if child.tag == "skipped":
                skipped[child.get("message") or ""] += 1
    slow = sorted(cases, key=lambda case: -float(case.get("time", 0)))[:8]
    return {
        "tests": len(cases), "passed_tests": len(cases) - len(failures) - skipped.total(),
        "failures": failures, "skipped": dict(skipped), "files": dict(files),
        "slowest": {case.get("name"): float(case.get("time", 0)) for case in slow},
    }  # fmt: skip


def run_pytest(before: Sequence[str], what: Sequence[str], seconds: float, **env: str) -> Any:
    """pytest on `what`, perhaps under another program: its result and the junit file's."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [*before, sys.executable, *PYTEST, *what]
        done = execute([*command, f"--junitxml={junit}"], seconds, **env)
        found = read_junit(junit)
    done["command"] = done["command"].rpartition(" ")[0]  # without the file, which is gone
    passed = done["status"] == 0 and found["tests"] > 0 and not found["failures"]
    return {"passed": passed, **done, **found}


def run_files(
    names: Sequence[str], args: argparse.Namespace, seconds: float, workers: int, select: str = ""
) -> Any:
    """pytest on some files of this folder, in several processes if pytest-xdist is there."""
    wanted = " and ".join(f"({one})" for one in (select, args.select) if one)
    how = ["-k", wanted] if wanted else []
    split = ["-n", str(workers)] if workers > 1 and find_spec("xdist") else []
    found = run_pytest((), [*(f"tests/gpu/test_{name}_gpu.py" for name in names), *how, *split],
                       seconds)  # fmt: skip
    found["passed"] = found["status"] in (0, NOTHING_SELECTED) and not found["failures"]
    output = found.pop("output")
    return found if found["passed"] else found | {"output": output[-4000:]}


def proved(found: dict[str, Any]) -> dict[str, Any]:
    """The same, but not passed if no test ran: skipped tests prove nothing."""
    return found | {"passed": found["passed"] and found.get("passed_tests", 0) > 0}


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Tests of kernels; they spend their time in compilers, so several share the GPU."""
    return proved(run_files(KERNEL_FILES, args, args.seconds, args.workers))


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Tests of engines, which spend their time on the host."""
    return proved(run_files(ENGINE_FILES, args, args.seconds, args.workers, f"not ({ALONE})"))


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Those of them that have the GPU for themselves."""
    return proved(run_files(ENGINE_FILES, args, args.seconds, 1, ALONE))


def wide(args: argparse.Namespace) -> dict[str, Any]:
    """Tests of captured steps, with layers as wide as those of models that people serve."""
    return proved(run_files(WIDE_FILES, args, args.seconds, 1))


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Tests of two GPUs."""
    return proved(run_files(("ranks",), args, args.seconds, 1))


def find_sanitizer() -> str | None:
    """compute-sanitizer, from the path or from where CUDA is usually installed."""
    usual = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or (str(usual[-1]) if usual else None)


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    """memcheck over a few kernels; torch's cache is off, so that each tensor has its own bounds."""
    program = find_sanitizer()
    if program is None:
        return {"passed": False, "reason": "compute-sanitizer is not installed"}
    memcheck = [program, "--tool", "memcheck", "--error-exitcode", "9"]
    what = [
        "-p",
        "tests.gpu.without_cudnn",
        *CHECKED,
        *(["-k", args.select] if args.select else []),
    ]
    found = run_pytest(memcheck, what, args.seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    output = found.pop("output")
    lines = output.splitlines()
    found["summary"] = [line for line in lines if "ERROR SUMMARY" in line]
    clean = any("ERROR SUMMARY: 0 errors" in line for line in found["summary"])
    found["passed"] = found["passed"] and clean and found["passed_tests"] > 0
    first = max(output.find("========= Invalid"), 0)  # a stack of the host follows each
    shown = output[first : first + 3000] + output[-3000:]
    return found if found["passed"] else found | {"output": shown}


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """`tests/gpu/soak.py` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "soak.json"
        how = ["--minutes", str(args.minutes), "--seed", str(args.seed), "--attn", args.attn]
        command = [sys.executable, "-m", "tests.gpu.soak", *how, "--device", args.device]
        done = execute([*command, "--json", str(out)], args.seconds)
        output = done.pop("output")
        done["command"] = done["command"].rpartition(" --json")[0]
        if not out.is_file():
            return {"passed": False, **done, "output": output[-4000:]}
        return {**done, **json.loads(out.read_text())["results"]}


def compare_scores(
    scores: dict[str, float], stored: dict[str, float], counts: dict[str, int]
) -> dict[str, Any]:
    """Each row beside the stored one, and all cases together; `passed` is about all of them.

    A row has too few cases for one point to mean anything: one case is two points or more.
    """
    rows = {
        name: {
            "cases": counts[name], "here": scores[name], "stored": stored[name],
            "difference": round(scores[name] - stored[name], 4),
            "within_a_point": abs(scores[name] - stored[name]) <= POINT + 1e-9,
        }
        for name in stored
    }  # fmt: skip
    here, there = (
        sum(table[name] * counts[name] for name in stored) / sum(counts.values())
        for table in (scores, stored)
    )
    return {
        "passed": abs(here - there) <= POINT, "all_cases": sum(counts.values()),
        "here": round(here, 5), "stored": round(there, 5), "difference": round(here - there, 5),
        "rows_beyond_a_point": [name for name, row in rows.items() if not row["within_a_point"]],
        "rows": rows,
    }  # fmt: skip


def accuracy(args: argparse.Namespace) -> dict[str, Any]:
    """The embedded model's held-out table, all machinery on, beside the CPU's float32 numbers."""
    from minisgl import LLM, SamplingParams
    from minisgl.config.paths import resolve_model_path
    from training import evaluate
    from training.checkpoint import load_model

    stored = json.loads(STORED.read_text())
    _, tokenizer = load_model(resolve_model_path(None), "cpu")
    counter = evaluate.token_counter(tokenizer)
    cases = evaluate.all_cases(stored["seed"], args.per_task, counter)
    greedy = SamplingParams(temperature=0.0, max_tokens=evaluate.MAX_NEW_TOKENS)
    how: dict[str, Any] = {"device": args.device, "attention_backend": args.attn}
    if args.device == "cuda":
        how["dtype"] = "bfloat16"
    start = time.monotonic()
    with LLM(overlap=True, cache_type="radix", **how) as llm:
        engine = llm.scheduler.engine
        outs: list[dict[str, Any]] = []

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            outs.extend(llm.generate(prompts, greedy))
            return [out["token_ids"] for out in outs]

        scores, wrong = evaluate.evaluate(generate, tokenizer, cases)
        check_integrity(llm.scheduler.cache)
        about = {
            "backend": engine.config.attention_backend, "dtype": engine.config.dtype,
            "kernels": engine.config.kernels, "page_size": engine.page_size,
            "graphs": list(getattr(engine.runners.decode, "sizes", ())),
            "cached_tokens": sum(out["cached_tokens"] for out in outs),
        }  # fmt: skip
    counts = Counter(case.name for case in cases)
    found = compare_scores(scores, stored["scores"], counts)
    print(evaluate.report(scores))
    print(f"all: {found['here']:.2%}, stored {found['stored']:.2%}")
    if args.device == "cuda":
        found["passed"] = found["passed"] and bool(about["graphs"]) and about["cached_tokens"] > 0
    new = [line for line in wrong if line not in stored["wrong"]]
    return {**found, **about, "seconds": round(time.monotonic() - start, 1), "newly_wrong": new}


def flashinfer_accuracy(args: argparse.Namespace) -> dict[str, Any]:
    """The same with FlashInfer in decode, too: recorded, over its plans."""
    return accuracy(argparse.Namespace(**{**vars(args), "attn": "fi"}))


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kernels": kernels, "engine": engine, "memory": memory, "wide": wide, "ranks": ranks,
    "sanitizer": sanitizer, "soak": soak, "accuracy": accuracy,
    "flashinfer accuracy": flashinfer_accuracy,
}  # fmt: skip
USUAL = [name for name in SECTIONS if name != "ranks"]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=USUAL,
                        help="default: all but ranks, which needs two GPUs")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=3.0, help="of the soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-task", type=int, default=50, help="cases; 50 are stored")
    parser.add_argument("--attn", default="auto", help="attention backends of accuracy and soak")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--select", default="", help="pytest's -k, for all but soak and accuracy")
    parser.add_argument("--workers", type=int, default=8, help="processes for tests of kernels")
    parser.add_argument("--seconds", type=float, default=560, help="limit of a section")
    return parser.parse_args(argv)


def command_of(args: argparse.Namespace, *names: str) -> str:
    """Return the command that makes these sections again, without the folder of the file."""
    how = ["--attn", args.attn, "--minutes", str(args.minutes), "--seed", str(args.seed)]
    how += ["--select", args.select] if args.select else []
    return shlex.join(["python3", "-m", "tests.gpu.report", "--only", *names, *how])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections one after the other; 0 if all passed."""
    args = parse(argv)
    results: dict[str, Any] = {}
    if args.out.is_file():
        results = json.loads(args.out.read_text())["results"]
    for name in args.only:
        print(f"== {name}", flush=True)
        about = circumstances() | {"command": command_of(args, name)}
        results[name] = {**SECTIONS[name](args), "circumstances": about}
        save(args.out, results, command_of(args, *args.only))  # each section has its own, too
    for name in args.only:
        print(f"{name}: {'passed' if results[name]['passed'] else 'FAILED'}")
    return 0 if all(results[name]["passed"] for name in args.only) else 1


if __name__ == "__main__":
    raise SystemExit(main())
