"""The time to the first token of single prompts, by their length.

`python3 -m tests.gpu.long_prompts --out FILE`
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.benchmark import latency
from minisgl.benchmark.report import save
from tests.gpu.trials import engine

WARM = 2  # prompts of each length before those that count


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--backend", default="auto", help="attention (default %(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    rows = []
    with engine(args.model, cuda_graph_max_bs=8, attention_backend=args.backend) as llm:
        for length in args.lengths:
            times = []
            for n in range(WARM + args.repeats):
                latency.start_together(llm, 1, length, 2, 0.0, 100 * length + n)
                times.append(latency.first_token_seconds(latency.drive(llm), 1)[-1] * 1e3)
            middle = round(statistics.median(times[WARM:]), 2)
            rows.append({"tokens": length, "ttft_ms": middle, "all_ms": times[WARM:]})
            print(args.model, length, middle, flush=True)
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python3", "-m", "tests.gpu.long_prompts", *given])
    save(args.out, {"model": args.model, "backend": args.backend, "rows": rows}, command)


if __name__ == "__main__":
    main()
