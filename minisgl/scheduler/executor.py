"""What a scheduler needs of an engine, so that another one can stand in.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from typing import Protocol

from minisgl.core import Batch
from minisgl.engine.step import ForwardInput, SampledTokens
from minisgl.kvcache.page_table import TableManager


class StepOutput(Protocol):
    """A step that was started."""

    def wait(self) -> SampledTokens:
        """Wait until the tokens are on the host, and return them."""


class Executor(Protocol):
    """Computes steps. It handles rows and slots; the scheduler owns the request lifecycle."""

    tables: TableManager
    num_pages: int
    page_size: int  # tokens
    max_seq_len: int  # tokens of a prompt and its answer together
    vocab_size: int

    def prepare(self, batch: Batch) -> ForwardInput:
        """Lay a step out on the host; may pad the batch and sort it."""

    def step(self, inputs: ForwardInput) -> StepOutput:
        """Start a step and return at once; steps run in the order of the calls."""

    def sample_deferred(self) -> None:
        """Sample the last step now, if it had to wait for the tokens of the step before."""

    def counts(self) -> dict[str, int]:
        """Return the counters for `/metrics`, by name."""

    def reset(self) -> None:
        """Wait for the steps under way and drop a deferred sampling; the caller forgets them."""

    def shutdown(self) -> None:
        """Free all memory; no step follows."""
