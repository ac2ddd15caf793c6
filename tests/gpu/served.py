"""A server with random weights under the load of `benchmark online`, with cached prompts.

`python3 -m tests.gpu.served --out FILE`: requests arrive at random, 20 a second, so that about 40
are answered at once. The first run fills the prefix cache and does not count.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from minisgl.benchmark import __main__ as benchmark
from minisgl.benchmark.options import model_folder
from minisgl.benchmark.overhead import with_tokenizer
from minisgl.benchmark.report import save
from minisgl.benchmark.serving import served

PROMPT, ANSWER, RATE, REQUESTS, RUNS = 512, 220, 20, 300, 3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    args = parser.parse_args(argv)
    words = f"--rate {RATE} --requests {REQUESTS} --seed 0".split()
    words += f"--input-len {PROMPT} {PROMPT} --output-len {ANSWER} {ANSWER}".split()
    with (
        TemporaryDirectory() as place,
        model_folder(args.model, True) as shapes,
        with_tokenizer(shapes, True) as (folder, _),
        served(folder, ["--dummy-weight", "--log-format", "none"]) as server,
    ):
        kept, runs = Path(place, "online.json"), []
        for _ in range(RUNS + 1):
            benchmark.main(["online", "--url", server.url, *words, "--json", str(kept)])
            runs += json.loads(kept.read_text())["results"]["runs"]
    given = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    command = shlex.join(["python3", "-m", "tests.gpu.served", *given])
    save(args.out, {"model": args.model, "load": words, "runs": runs[1:]}, command)


if __name__ == "__main__":
    main()
