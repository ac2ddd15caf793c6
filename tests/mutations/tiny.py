"""Bugs in the data and the training of the embedded model."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        "the split forgets which half was asked for",
        module="training.data",
        old="if is_held_out(turn.key) == held_out:",
        new="if True:",
        test="tests/test_tiny.py::test_training_and_evaluation_never_share_operands",
    ),
    Mutation(
        "held-out pairs are trained on",
        module="training.lookup",
        old="if not is_held_out(turn.key):",
        new="if turn.key:",
        test="tests/test_tiny.py::test_held_out_pairs_and_requests_are_never_trained_on",
    ),
    Mutation(
        "the user's words are learnt, too",
        module="training.tokenizer",
        old="starts = np.flatnonzero(ids == ASSISTANT_ID) + 1",
        new="starts = np.flatnonzero(ids == ASSISTANT_ID - 1)[:3] + 1",
        test="tests/test_tiny.py::test_only_the_assistant_is_learnt",
    ),
    Mutation(
        "the free room of a row is counted once too often",
        module="training.batches",
        old="row, free = [], row_tokens + 1",
        new="row, free = [], row_tokens + 2",
        test="tests/test_tiny.py::test_packing_loses_and_invents_nothing",
    ),
    Mutation(
        "a count aloud skips nothing",
        module="training.data",
        old="count += hit",
        new="count += 1",
        test="tests/test_tiny.py::test_answers_are_right",
    ),
    Mutation(
        "what a grammar writes is learnt, too",
        module="training.tokenizer",
        old="learnt[start + skipped :",
        new="learnt[start:",
        test="tests/test_tiny.py::test_only_the_assistant_is_learnt",
    ),
    Mutation(
        "pairs of core and carrier are not split",
        module="training.phrases",
        old='is_held_out(f"{carrier} {core}")',
        new='is_held_out(f"{carrier}")',
        test="tests/test_tiny.py::test_pairs_of_core_and_carrier_are_split",
    ),
    Mutation(
        "a second response of a tool begins a turn of its own",
        module="training.tokenizer",
        old="loop.previtem['role'] != 'tool'",
        new="loop.previtem['role'] != 'user'",
        test="tests/test_tiny.py::test_chat_template_knows_every_role_and_kind_of_content",
    ),
]
