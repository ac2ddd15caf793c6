"""Faults by which what clients send could stop a server at its stderr, or fill a disk."""

from tests.mutations import Mutation

TEST = "tests/test_stderr.py::"
RELAY, CUT = (
    TEST + "test_no_write_waits_and_what_came_first_is_kept",
    (TEST + "test_a_flood_is_cut_and_counted_and_the_next_minute_is_another"),
)
MODULE, FCFS = "minisgl.server.observe.stderr", "test_order_of_arrival_is_for_one_client"

MUTATIONS = [
    Mutation(
        name="stderr: a server's is the one that it was given",
        module="minisgl.server.cli",
        old="        stack.enter_context(relayed())  # after the log, before the workers\n",
        new="",
        test=TEST + "test_malformed_requests_neither_stop_a_server_nor_fill_its_log",
    ),
    Mutation(
        name="stderr: a line may come again without an end",
        module=MODULE,
        old="self._passed[line] < SAME and ",
        new="",
        test=CUT,
    ),
    Mutation(
        name="stderr: lines that differ have no bound",
        module=MODULE,
        old=" and self._size + len(line) <= MOST",
        new="",
        test=CUT,
    ),
    Mutation(
        name="stderr: what a minute passed on counts for ever",
        module=MODULE,
        old="        self._passed.clear()\n",
        new="",
        test=CUT,
    ),
    Mutation(
        name="stderr: a minute's characters count for ever",
        module=MODULE,
        old="        self._size = self._dropped = 0\n        self._ends = self._clock() + 60",
        new="        self._dropped = 0\n        self._ends = self._clock() + 60",
        test=CUT,
    ),
    Mutation(
        name="stderr: dropped lines are not reported at the end",
        module=MODULE,
        old="            limit(line)\n        limit.renew()\n",
        new="            limit(line)\n",
        test=RELAY,
    ),
    Mutation(
        name="stderr: children do not inherit the relay",
        module=MODULE,
        old="os.dup2(writer, 2)",
        new="os.dup2(writer, 2, False)",
        test=RELAY,
    ),
    Mutation(
        name="stderr: half a line at the end is lost",
        module=MODULE,
        old="        if line := line.removesuffix(end):\n            limit(line)\n",
        new="",
        test=RELAY,
    ),
    Mutation(
        name="stderr: lines of requests are limited",
        module="minisgl.server.observe.logs",
        old="own = os.dup(descriptor)",
        new="own = descriptor",
        test=RELAY,
    ),
    Mutation(
        name="access: several clients in order of arrival are not worth a warning",
        module="minisgl.server.http.access",
        old='policy == "fcfs" and (len(keys) > 1 or not is_loopback(host))',
        new='policy == "fcfs" and not is_loopback(host)',
        test=TEST + FCFS,
    ),
    Mutation(
        name="access: a network in order of arrival is not worth a warning",
        module="minisgl.server.http.access",
        old='policy == "fcfs" and (len(keys) > 1 or not is_loopback(host))',
        new='policy == "fcfs" and len(keys) > 1',
        test=TEST + FCFS,
    ),
]
