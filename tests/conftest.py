"""Settings of all tests, of those in this folder and of the chapters that nbval runs.

pytest reads a `conftest.py` only for files beside or below it, so `notebooks/` has one that
takes over what is here.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import zlib
from datetime import date
from pathlib import Path

import build  # notebooks/build.py
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, Phase, settings

from tests.browser import browser  # noqa: F401, a fixture
from tests.compiled import allow_compiled, compile_tests
from tests.forks import WorkerPopen, warm
from tests.interpreter import quicken
from tests.provisioner import ForkedProvisioner

GPU = build.has_gpu()
# Without a GPU those files are not even imported; chapters' `gpu` cells are skipped one by one.
collect_ignore_glob = [] if GPU else ["gpu/*"]
# What `pytest -m quick` leaves out: whole processes, the interpreter of Triton, long random runs.
# The longest comes first; so it is run, too.
SLOW = [
    "test_server_operations", "test_mutations", "test_mutations_odd", "test_paced", "test_labs",
    "test_server_faults", "test_hostile", "test_interrupts", "test_compile",
    "test_tensor_parallel", "test_structured_output", "test_online",
    "test_deterministic", "test_sampler", "test_build", "test_fused", "test_moe_kernels",
    "test_speculative", "test_tools", "test_server_responses", "test_soak_script", "test_benchmark",
    "test_server_api", "test_tiny", "test_paged_equals_dense", "test_fp8", "test_prefill_graph",
    "test_fp8_experts", "test_decode_path", "test_server", "test_graph", "test_server_clients",
    "test_adversary",
]  # fmt: skip
DAYS = 32  # numbers that a day can have
MUTATIONS, DRILLS = DAYS, 4  # days from one turn to the next
# Before anything imports torch or triton: threads, no network, Triton's interpreter on a CPU.
build.run_environment(Path(__file__).resolve().parents[1])
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Each client of httpx would read all certificates, in 30 ms, for servers that speak no TLS.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ.pop("SSL_CERT_FILE", None)
# Tests that name no timeout get httpx's 5 seconds, which a busy machine exceeds.
DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.connect = 100

# A busy machine is slow, and that is no fault of a test.
settings.register_profile(
    "book", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
# A mutated package must fail a test; there is no need to find the smallest example of it.
settings.register_profile(
    "mutation", settings.get_profile("book"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "book"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which of the tests that take turns run."""
    days = map(str, range(DAYS))
    parser.addoption(
        "--rotate", choices=("today", "all", "none", *days), default="today",
        help="which bugs to put into copies of the package, which drills of whole servers and "
        f"which parts of large products to run: all, none, or those of one day of {DAYS} "
        "(default: today)",
    )  # fmt: skip
    parser.addoption(
        "--adversary", type=int, default=40_000, metavar="TURNS",
        help="turns of the loop that the adversary of the scheduler takes, of fresh seeds",
    )  # fmt: skip


def settle_rotation(choice: str, day: int, selected: bool) -> str:
    """Return the value of `today` for a day (a number of `date`); `all` if tests are selected."""
    if choice != "today":
        return choice
    return "all" if selected else str(day % DAYS)


def is_left_out(item: pytest.Item, choice: str) -> bool:
    """True for what has another day; names decide, so that a new test moves no other."""
    mutation = getattr(getattr(item, "callspec", None), "params", {}).get("mutation")
    if turn := item.get_closest_marker("turn"):
        number, turns = turn.args
    elif mutation:
        number, turns = zlib.crc32(mutation.name.encode()), MUTATIONS
    elif item.get_closest_marker("drill"):
        number, turns = zlib.crc32(item.name.encode()), DRILLS
    else:
        return False
    return choice != "all" and (choice == "none" or (number - int(choice)) % turns != 0)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what a run leaves out."""
    choice = config.getoption("rotate")
    part = f"day {choice} of {DAYS}" if choice.isdigit() else choice
    lines = [f"mutations, drills and parts: {part} (--rotate all runs every one)"]
    return lines if GPU else [*lines, "no GPU: tests/gpu is not collected"]


def pytest_configure(config: pytest.Config) -> None:
    """Name our markers, and find nbval's rules from any working directory."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, skipped where there is none")
    config.addinivalue_line("markers", "quick: the tests to run before each change")
    config.addinivalue_line("markers", "clock: measures real time; may try three times")
    config.addinivalue_line("markers", "turn(n, days): the n-th day of so many; see in_turns")
    config.addinivalue_line("markers", "drill: a fault or load of whole servers; takes turns")
    config.option.rotate = settle_rotation(  # the workers of pytest-xdist inherit it
        getattr(config.option, "rotate", "all"),
        date.today().toordinal(),
        bool(config.option.keyword) or any("::" in word for word in config.args),
    )
    rules = getattr(config.option, "nbval_sanitize_with", None)
    if rules:
        ForkedProvisioner.use()
        config.option.nbval_sanitize_with = str(config.rootpath / rules)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Make workers forks of one process with all libraries; CUDA would not survive that.

    While it imports them, here is the time to compile the tests.
    """
    allow_compiled()
    if not GPU:
        warm()
        subprocess.Popen = WorkerPopen  # type: ignore[misc]
    compile_tests(config, Path(__file__).parent)


def pytest_collection_finish() -> None:
    """Freeze the objects of now: garbage collections in tests skip them."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect garbage once among a million objects; pytest would five times."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m quick` does not even import what it leaves out."""
    left_out = collection_path.suffix == ".ipynb" or collection_path.stem in SLOW
    return True if config.option.markexpr == "quick" and left_out else None


def turn(item: pytest.Item) -> int:
    """Slow files begin, chapters follow, quick files end: no process works on when others rest."""
    if item.path.stem in SLOW:
        return SLOW.index(item.path.stem)
    return len(SLOW) + (item.path.suffix != ".ipynb")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark quick tests; leave mutations out; without a GPU, skip what is marked or tagged `gpu`.

    Tests marked `clock` are run again when they fail: the machine may have been busy with something
    else. The summary lists them (R).
    """
    if "triton" in sys.modules:
        quicken()
    items.sort(key=turn)
    left_out = [item for item in items if is_left_out(item, config.getoption("rotate"))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if isinstance(item, pytest.Function) and item.path.stem not in SLOW:
            item.add_marker("quick")
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        tags = getattr(item, "cell", {}).get("metadata", {}).get("tags", [])
        if not GPU and ("gpu" in tags or item.get_closest_marker("gpu")):
            item.add_marker(skip)
