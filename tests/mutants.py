"""Which mutations of scheduler and caches does the adversary find?

    python -m tests.mutants NAME           play against one until a seed fails; print its script
    python -m tests.mutants --store FILE   play against all, at most `--steps` turns each

No file is changed: the source of one module is replaced while a fresh process imports it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests import mutations
from tests.mutations import Mutation

CHAPTERS = ("minisgl.kvcache.", "minisgl.scheduler.")
# These are not part of the game: checks, memory, messages, and the compilation of grammars.
OTHERS = (
    "audit", "pool", "fp8_pool", "build", "channel", "frames", "forms", "side", "side_process",
)  # fmt: skip


def all_mutations() -> dict[str, Mutation]:
    """Those of scheduler, queue, admission and caches, by name."""
    modules = [importlib.import_module(f"tests.mutations.{entry.name}")
               for entry in pkgutil.iter_modules(mutations.__path__)]  # fmt: skip
    listed = [mutation for module in modules for mutation in getattr(module, "MUTATIONS", [])]
    return {m.name: m for m in listed
            if m.module.startswith(CHAPTERS) and m.module.split(".")[-1] not in OTHERS}  # fmt: skip


class Broken(SourceFileLoader):
    """Loads a module as it is after a mutation; compiled forms of it are neither read nor kept."""

    mutation: Mutation

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode()
        assert text.count(self.mutation.old) == 1, self.mutation.name
        return compile(text.replace(self.mutation.old, self.mutation.new), self.path, "exec")


class Finder(MetaPathFinder):
    """Finds the one module that a mutation changes."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.mutation.module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = loader = Broken(fullname, spec.origin)
        loader.mutation = self.mutation
        return spec


def attack(mutation: Mutation, steps: int, shorten: bool = False) -> dict[str, Any]:
    """Break the package, then play; what was found, and after how much work."""
    assert mutation.module not in sys.modules, "a fresh process is needed"
    sys.meta_path.insert(0, Finder(mutation))
    from tests import adversary  # not before the package is broken

    start = time.process_time()
    taken, failed = adversary.search(adversary.fresh_seeds(0), steps)
    seconds = round(time.process_time() - start, 2)
    if shorten and failed is not None:
        print(adversary.report(failed))
    return {"name": mutation.name, "turns": taken, "seconds": seconds, "seed": failed}


def attack_all(names: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """Each in a fork of this process, which has no module of the package."""
    listed = [all_mutations()[name] for name in names]
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(partial(attack, steps=steps), listed, chunksize=1)


def main() -> None:
    """The command line: one mutation, or all of them."""
    parser = argparse.ArgumentParser("python -m tests.mutants")
    parser.add_argument("name", nargs="?", choices=list(all_mutations()), metavar="NAME")
    parser.add_argument("--steps", type=int, default=100_000, help="turns of the loop, at most")
    parser.add_argument("--store", type=Path, help="what is found of all mutations")
    given = parser.parse_args()
    if given.name is not None:
        print(attack(all_mutations()[given.name], given.steps, shorten=True))
        return
    for name in ("llguidance", "torch"):  # once for all forks
        importlib.import_module(name)

    rows = []
    for found in attack_all(list(all_mutations()), given.steps):
        rows.append(found)
        print(found, flush=True)
    if given.store is not None:
        given.store.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
