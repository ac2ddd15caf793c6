# ruff: noqa
"""Variants side by side in one engine each: `patch -p0 < tests/gpu/ahead.patch; python3 -m tests.gpu.ahead OUT GROUP,...`"""

import gc, json, sys, time, os
import torch
import numpy as np
from minisgl import LLM, SamplingParams
from minisgl.benchmark.latency import measure_latency
from minisgl.benchmark.options import model_folder
from minisgl.kernels.linear import KNOBS
from minisgl.kernels import linear, moe, decode_attention

BASE = {
    "attn": 0,
    "bulk": True,
    "parts": 2,
    "max_bs": 64,
    "row": "",
    "limit": 0,
    "align": 0,
    "experts_mb": 0,
    "experts_min": 32,
    "warps": 8,
}
MB = 1 << 20
G = {
    "small": [
        (
            "Qwen/Qwen3-0.6B",
            {},
            (1, 8, 64),
            256,
            [
                {},
                {"attn": 1},
                {"attn": 1, "parts": 1},
                {"attn": 1, "parts": 3},
                {"attn": 1, "bulk": False},
                {"attn": 2},
                {"attn": 3},
                {"attn": 4},
                {"attn": 5},
                {"row": "qkv"},
                {"row": "chain"},
                {"row": "chain2"},
                {"attn": 1, "row": "chain"},
                {},
            ],
        )
    ],
    "8B": [
        (
            "Qwen/Qwen3-8B",
            {},
            (1, 8, 64),
            96,
            [
                {},
                {"attn": 1, "parts": 1},
                {"attn": 1, "parts": 2, "limit": 24 * MB},
                {"attn": 2, "parts": 1},
                {"attn": 5, "parts": 1},
                {"row": "chain", "limit": 16 * MB},
                {},
            ],
        )
    ],
    "fp8": [
        (
            "Qwen/Qwen3-8B",
            {"quantization": "fp8"},
            (1, 8, 64),
            96,
            [
                {},
                {"attn": 1, "parts": 1},
                {"attn": 1, "parts": 2, "limit": 24 * MB},
                {"row": "chain", "limit": 16 * MB},
                {},
            ],
        )
    ],
    "moe": [
        (
            "Qwen/Qwen3-30B-A3B",
            {},
            (1, 8, 64),
            64,
            [
                {},
                {"align": 4},
                {"align": 2},
                {"align": 4, "warps": 4},
                {"align": 4, "attn": 1, "parts": 1},
                {"align": 4, "experts_mb": 16},
                {"align": 4, "experts_mb": 32},
                {"align": 4, "attn": 1, "parts": 1, "experts_mb": 24, "experts_min": 8},
                {},
            ],
        )
    ],
}
out, groups = sys.argv[1], sys.argv[2].split(",")
rows = []


def tokens(llm):
    rng = np.random.default_rng(3)
    got = []
    for n in (1, 8, 40):
        prompts = rng.integers(0, 10000, (n, 300)).tolist()
        got.append(
            [
                o["token_ids"] if "token_ids" in o else o["text"]
                for o in llm.generate(
                    prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
                )
            ]
        )
    return got


for group in groups:
    for model, fields, batches, length, variants in G[group]:
        t = time.time()
        with (
            model_folder(model, True) as folder,
            LLM(
                folder,
                use_dummy_weight=True,
                cuda_graph_bs=(1, 8, 40, 64),
                max_running_req=64,
                num_pages=6000,
                **fields,
            ) as llm,
        ):
            print(group, "start", round(time.time() - t, 1), flush=True)
            engine = llm.scheduler.engine
            first = None
            for v in variants:
                KNOBS.update(BASE)
                KNOBS.update(v)
                t = time.time()
                try:
                    with torch.cuda.stream(engine.stream):
                        engine.graph.capture(False)
                    torch.cuda.synchronize()
                    c = time.time() - t
                    found = tokens(llm)
                    if first is None:
                        first = found
                    same = [a == b for a, b in zip(found, first)]
                    m = measure_latency(
                        llm,
                        batches,
                        prompt_len=512,
                        output_len=length,
                        sampling=["greedy"],
                        repeats=2,
                    )
                    row = {
                        "model": model,
                        **fields,
                        "variant": v,
                        "same": same,
                        "ms": {r["batch"]: r["all_tpot_ms"] for r in m},
                        "ttft": [r["ttft_ms"]["p50"] for r in m],
                    }
                except Exception as e:
                    row = {"model": model, "variant": v, "error": repr(e)[:500]}
                    c = 0
                row["s"] = [round(c, 1), round(time.time() - t, 1)]
                rows.append(row)
                print(json.dumps(row), flush=True)
                json.dump(rows, open(out, "w"))
        del llm, engine
        gc.collect()
        torch.cuda.empty_cache()
