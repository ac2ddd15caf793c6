"""Bugs of communicators, rank processes and the rank protocol."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_tensor_parallel.py::"
BATCHES = T + "test_pitfall_05_ranks_build_the_same_batches"

MUTATIONS = [
    Mutation(
        "ranks: the decode batch is in the order of object addresses",
        "minisgl.scheduler.decode",
        "reqs = list(self.running.values())",
        "reqs = sorted(self.running.values(), key=id)",
        BATCHES + "[fcfs-True-radix]",
    ),
    Mutation(
        "ranks: other ranks do not get the messages",
        "minisgl.runtime.ranks",
        "messages: list[Msg] = self.comm.broadcast_object(mine)",
        "messages: list[Msg] = [*mine, *self.comm.broadcast_object([])]",
        T + "test_broadcast_channel_passes_messages_in_order_and_drops_replies",
    ),
    Mutation(
        "ranks: any rank may own the channel",
        "minisgl.runtime.ranks",
        "if (outer is not None) != (comm.rank == 0):",
        "if False:",
        T + "test_broadcast_channel_passes_messages_in_order_and_drops_replies",
    ),
    Mutation(
        "ranks: only the lowest values are compared",
        "minisgl.runtime.ranks",
        "all(low == -high for low, high in zip(ends[:size], ends[size:]))",
        "ends[:size] == list(values)",
        T + "test_require_equal_finds_a_rank_that_differs",
    ),
    Mutation(
        "ranks: the highest is the lowest",
        "minisgl.runtime.ranks",
        "return lowest, -minus_highest",
        "return lowest, lowest",
        T + "test_lowest_and_highest_with_one_minimum",
    ),
    Mutation(
        "threads: parts are gathered in reverse",
        "minisgl.parallel.threads",
        "return torch.cat(self.exchange(x), dim)",
        "return torch.cat(self.exchange(x)[::-1], dim)",
        T + "test_threads_keep_the_same_protocol",
    ),
    Mutation(
        "threads: one failure leaves the others waiting",
        "minisgl.parallel.threads",
        "meeting.barrier.abort()",
        "pass",
        T + "test_a_thread_that_fails_frees_the_others",
    ),
    Mutation(
        "gloo: the minimum is a sum",
        "minisgl.parallel.gloo",
        "c10d.ReduceOp.MIN",
        "c10d.ReduceOp.SUM",
        T + "test_gloo_processes[2]",
    ),
    Mutation(
        "gloo: an idle server times out",
        "minisgl.parallel.gloo",
        "options.timeout = src, 0, FOREVER",
        "options.timeout = src, 0, timedelta(seconds=1)",
        T + "test_a_long_silence_is_no_error",
    ),
    Mutation(
        "launch: a failed rank counts as done",
        "minisgl.runtime.launch",
        'report.send(("failed", traceback.format_exc()))',
        'report.send(("done", None))',
        T + "test_death_of_a_rank_is_raised_with_its_traceback",
    ),
    Mutation(
        "launch: the one who lost the connection is blamed",
        "minisgl.runtime.launch",
        'self.failures("failed") or self.failures("lost")',
        'self.failures("lost") or self.failures("failed")',
        T + "test_the_guilty_rank_is_blamed_not_those_who_lost_it",
    ),
    Mutation(
        "launch: two ranks share a GPU",
        "minisgl.runtime.ranks",
        "len(set(devices)) == 1",
        "len(set(devices)) == 0",
        T + "test_one_gpu_is_not_shared_by_ranks",
    ),
    Mutation(
        "launch: ranks outlive their parent",
        "minisgl.runtime.launch",
        "    leave_with_parent()\n    try:",
        "    try:",
        T + "test_ranks_do_not_outlive_their_parent",
    ),
    Mutation(
        "launch: a hung rank is left behind",
        "minisgl.runtime.launch",
        'for insist in ("terminate", "kill"):',
        "for insist in ():",
        T + "test_a_rank_that_hangs_ends_the_group",
    ),
]
