"""Bugs of communicators, rank processes and the rank protocol."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_tensor_parallel.py::"
BATCHES = T + "test_pitfall_05_ranks_build_the_same_batches"

MUTATIONS = [
    Mutation(
        "ranks: the decode batch is in the order of object addresses",
        "minisgl.scheduler.phases",
        "reqs = list(self.running.values())",
        "reqs = sorted(self.running.values(), key=id)",
        BATCHES + "[fcfs-True-radix]",
    ),
    Mutation(
        "ranks: other ranks do not get the messages",
        "minisgl.runtime.broadcast",
        "self.comm.broadcast_object(CODEC.encode(mine), kind=bytes)",
        "self.comm.broadcast_object(CODEC.encode([]), kind=bytes)",
        T + "test_broadcast_channel_passes_messages_in_order_and_drops_replies",
    ),
    Mutation(
        "ranks: any rank may own the channel",
        "minisgl.runtime.broadcast",
        "if (outer is not None) != (comm.rank == 0):",
        "if False:",
        T + "test_broadcast_channel_passes_messages_in_order_and_drops_replies",
    ),
    Mutation(
        "all-reduce: a row does not take its turn",
        "minisgl.kernels.all_reduce",
        "(turn + 1) % 3)",
        "turn)",
        T + "test_rows_are_summed_in_shared_memory",
    ),
    Mutation(
        "all-reduce: the row of the call before stays where it is",
        "minisgl.kernels.all_reduce",
        "part + before, EMPTY,",
        "part + before, 0,",
        T + "test_rows_are_summed_in_shared_memory",
    ),
    Mutation(
        "all-reduce: numbers travel one by one",
        "minisgl.kernels.all_reduce",
        "tl.store(tl.multiple_of(there, 16) + ",
        "tl.store(there + ",
        T + "test_a_sum_of_rows_moves_16_bytes_at_a_time",
    ),
    Mutation(
        "fused: parts of a product are not summed over the ranks",
        "minisgl.models.fused",
        "parts is not None and self.comm.size > 1",
        "parts is not None and self.comm.size > 2",
        T + "test_the_fused_model_on_two_ranks_equals_the_plain_one",
    ),
    Mutation(
        "launch: an orderly end of a rank counts as a death",
        "minisgl.runtime.ranks",
        "    if status != 0:\n",
        "    if True:\n",
        T + "test_a_bad_end_of_a_rank_frees_the_gpu",
    ),
    Mutation(
        "launch: a death whose status another thread took frees nothing",
        "minisgl.runtime.ranks",
        "status = process.exitcode",
        "status = 0",
        T + "test_a_bad_end_of_a_rank_frees_the_gpu",
    ),
    Mutation(
        "launch: the parent keeps the sockets of the other ranks",
        "minisgl.runtime.ranks",
        "for link in self.given:",
        "for link in ():",
        T + "test_a_rank_that_dies_before_ranks_have_met_is_told_soon[2-1]",
    ),
    Mutation(
        "launch: what is computed without a rank is told",
        "minisgl.runtime.ranks",
        "if self.ranks.lost.is_set():",
        "if False:",
        T + "test_nothing_leaves_rank_0_once_a_rank_is_lost",
    ),
    Mutation(
        "sockets: the minimum is a maximum",
        "minisgl.parallel.sockets",
        "torch.minimum(x, part)",
        "torch.maximum(x, part)",
        T + "test_processes_equal_transformers[2]",
    ),
    Mutation(
        "sockets: an idle server times out",
        "minisgl.parallel.sockets",
        'with self.attempt("broadcast"):',
        'with self.attempt("broadcast", self.timeout):',
        T + "test_a_long_silence_is_no_error",
    ),
    Mutation(
        "sockets: the death of a rank that is not waited for is not noticed",
        "minisgl.parallel.sockets",
        "for each in self.links:",
        "for each in [link]:",
        T + "test_a_rank_that_dies_before_ranks_have_met_is_told_soon[4-3]",
    ),
    Mutation(
        "sockets: calls of any length fit together",
        "minisgl.parallel.sockets",
        "if length != len(into):",
        "if False:",
        T + "test_different_calls_are_an_error",
    ),
    Mutation(
        "sockets: rank 0 alone gets the sum",
        "minisgl.parallel.sockets",
        "                x += part\n            self._spread(x)",
        "                x += part",
        T + "test_processes_equal_transformers[2]",
    ),
    Mutation(
        "launch: a failed rank counts as done",
        "minisgl.runtime.supervisor",
        'kind = "lost" if isinstance(error, PeerFailed) else "failed"',
        'kind = "done"',
        T + "test_death_of_a_rank_is_raised_with_its_traceback",
    ),
    Mutation(
        "launch: the one who lost the connection is blamed",
        "minisgl.runtime.supervisor",
        'kinds.get("failed") or kinds["lost"]',
        'kinds.get("lost") or kinds["failed"]',
        T + "test_the_guilty_rank_is_blamed_not_those_who_lost_it",
    ),
    Mutation(
        "launch: reports of ranks that have ended are waited for",
        "minisgl.runtime.supervisor",
        "timeout=seconds) if running else []",
        "timeout=seconds)",
        T + "test_nobody_waits_for_reports_of_ranks_that_have_ended",
    ),
    Mutation(
        "launch: graphs outlive the group",
        "minisgl.runtime.ranks",
        "            shutdown()\n        leave_group()",
        "            leave_group()\n        shutdown()",
        T + "test_graphs_go_before_the_group_is_left",
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
        "minisgl.runtime.supervisor",
        "    exit_with_parent(folder)\n",
        "",
        T + "test_a_program_ends_with_the_ranks_that_it_left_open",
    ),
    Mutation(
        "launch: a program waits for ranks that it forgot",
        "minisgl.runtime.supervisor",
        "        Finalize(self, kill_orphans, (list(self.processes.values()),), exitpriority=0)\n",
        "",
        T + "test_a_program_ends_with_the_ranks_that_it_left_open",
    ),
    Mutation(
        "launch: a hung rank is left behind",
        "minisgl.runtime.supervisor",
        "for sig, seconds in ((LEAVE, 1.0), (signal.SIGKILL, 2.0)):",
        "for sig, seconds in ():",
        T + "test_a_rank_that_hangs_ends_the_group",
    ),
]
