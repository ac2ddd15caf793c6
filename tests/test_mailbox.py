"""The mailbox of recorded steps: letters and deliveries in host memory, in the interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from minisgl.engine import step_graph
from minisgl.engine.mailbox import DEPTH, Mailbox
from minisgl.engine.sampler import SampleOutput
from minisgl.engine.step import PACKED, Delivery, ForwardOutput
from minisgl.kernels.mailbox import close_step, open_step
from minisgl.kvcache.page_table import TableManager

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the same on a GPU")
CPU = torch.device("cpu")
FIELDS = len(PACKED)


class Late:
    """A device that runs its steps in order, and each as late as it may."""

    def __init__(self, box: Mailbox, tokens: torch.Tensor) -> None:
        self.box, self.tokens = box, tokens
        self.sizes: list[int] = []
        self.done = 0
        self.read: list[torch.Tensor] = []  # what each step found in its letter

    def step(self, size: int) -> None:
        """Read the letter, draw the token after the input, deliver it."""
        memory = torch.full((FIELDS, size), -1)
        ids = self.box.open(memory, self.tokens)
        assert torch.equal(ids, self.tokens[memory[0]])
        self.read.append(memory)
        self.box.close(ids + 1, memory[1], self.tokens, torch.empty_like(ids))

    def run_until(self, number: int) -> None:
        while self.done <= number:
            self.step(self.sizes[self.done])
            self.done += 1


class EndOf:
    """The end of one of its steps."""

    def __init__(self, late: Late, number: int) -> None:
        self.late, self.number = late, number

    def synchronize(self) -> None:
        self.late.run_until(self.number)


def letter(size: int, seed: int, most: int) -> NDArray[np.int64]:
    """Random integers; the first two fields are different places in a pool of 2 * most tokens."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(-(2**62), 2**62, (FIELDS, size))
    places = rng.permutation(2 * most)
    packed[0], packed[1] = places[:size], places[most : most + size]
    return packed


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    asked=st.sets(st.integers(0, 11)),
)
def test_no_letter_and_no_delivery_is_lost(sizes: list[int], asked: set[int]) -> None:
    most, tokens = 5, torch.arange(1000, 1010)
    late = Late(Mailbox(FIELDS, most, CPU), tokens)
    late.box.mark = lambda device: EndOf(late, len(late.sizes) - 1)
    want_tokens, want, letters, deliveries = tokens.clone(), [], [], []
    for number, size in enumerate(sizes):
        packed = letter(size, number, most)
        late.box.post(packed)
        late.sizes.append(size)
        letters.append(packed.copy())
        deliveries.append(late.box.launched(size))
        packed[:] = 0  # the host's own array is free at once
        drawn = want_tokens[letters[-1][0]] + 1
        want_tokens[letters[-1][1]] = drawn
        want.append(drawn.tolist())
        assert late.done >= number + 1 - DEPTH, "a slot was written before its step had ended"
        if number in asked:
            assert deliveries[number].take() == want[number]
    assert [delivery.take() for delivery in deliveries] == want
    assert torch.equal(tokens, want_tokens) and int(late.box.turn) == len(sizes)
    assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(late.read, letters, strict=True))


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("where", ["before it is counted", "while it is counted"])
def test_an_interrupted_launch_does_not_shift_the_slots(steps: int, ran: bool, where: str) -> None:
    """Ctrl-C behind a letter: whether its step was launched or not, the next ones are right."""
    box, tokens = Mailbox(FIELDS, 4, CPU), torch.arange(1000, 1008)
    late = Late(box, tokens)

    def full_step(size: int, seed: int) -> None:
        packed = letter(size, seed, 4)
        want = tokens[packed[0]] + 1
        box.post(packed)
        late.step(size)
        assert box.launched(size).take() == want.tolist()
        assert torch.equal(late.read[-1], torch.from_numpy(packed))

    def interrupt(device: torch.device) -> None:
        raise KeyboardInterrupt

    for number in range(steps):
        full_step(1 + number, number)
    box.post(letter(3, 99, 4))
    if ran:
        late.step(3)
    if where == "while it is counted":
        box.mark, mark = interrupt, box.mark
        with pytest.raises(KeyboardInterrupt):
            box.launched(3)
        box.mark = mark
    for number in range(4):
        full_step(4 - number, 50 + number)
    assert int(box.turn) == box.steps == steps + ran + 4


def test_a_step_reads_and_writes_its_slot_alone() -> None:
    inbox, turn = torch.arange(2 * FIELDS * 4).view(2, -1), torch.tensor([3])
    tokens, memory = torch.arange(100, 200), torch.full((FIELDS, 3), -1)
    ids, outbox = torch.full((3,), -1), torch.full((2, 4), -1)
    open_step(inbox, turn, tokens, memory, ids)
    assert torch.equal(memory, inbox[1, : FIELDS * 3].view(FIELDS, 3)) and int(turn) == 3
    assert ids.tolist() == [128, 129, 130]
    close_step(torch.tensor([7, 8, 9]), torch.tensor([50, 4, 60]), tokens, ids, outbox, turn)
    assert outbox.tolist() == [[-1, -1, -1, -1], [7, 8, 9, -1]] and int(turn) == 4
    assert ids.tolist() == [7, 8, 9] and tokens[[50, 4, 60]].tolist() == [7, 8, 9]
    assert int((tokens != torch.arange(100, 200)).sum()) == 3


def test_a_step_of_one_and_of_the_largest_size() -> None:
    for size, most in ((1, 1), (1, 256), (256, 256), (200, 256)):
        box, tokens = Mailbox(FIELDS, most, CPU), torch.arange(2 * most)
        for number in range(3):
            packed = letter(size, number, most)
            box.post(packed)
            late = Late(box, tokens)
            want = tokens[packed[0]] + 1
            late.step(size)
            assert box.launched(size).take() == want.tolist()


def test_an_output_gives_the_ids_of_real_requests_only() -> None:
    place = np.array([5, 6, 0, 0])
    output = ForwardOutput(SampleOutput(torch.tensor([5, 6])), Delivery(place, None))
    assert output.wait().ids == [5, 6]
    place[:] = 9  # the next step but one writes there
    assert output.wait().ids == [5, 6]


def test_only_backends_without_a_plan_get_a_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan reads the rows of a batch before its graph starts, so a copy must bring them."""
    asked: list[int] = []
    monkeypatch.setattr(step_graph, "load_mailbox", lambda most, device: asked.append(most))
    tables = TableManager(num_rows=4, max_len=12, page_size=4, dummy_page=9, device="cpu")
    for plan_free, want in ((False, []), (True, [8])):
        step_graph.StepGraphs(
            draw=lambda logits, keys, temperature: logits.argmax(-1),
            forward=lambda fb: torch.zeros(1), backend=SimpleNamespace(plan_free=plan_free),
            tables=tables, sizes=(4, 8), device="cpu", vocab_size=50,
        )  # fmt: skip
        assert asked == want
