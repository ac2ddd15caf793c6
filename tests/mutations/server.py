"""Faults of a server that a test must notice."""

from tests.mutations import Mutation

TEST = "tests/test_server.py::"

MUTATIONS = [
    Mutation(
        name="server: a client that leaves is not aborted",
        module="minisgl.server.frontend",
        old="if not ended:\n                outbox.put(AbortMsg(uid=uid))",
        new="if not ended:\n                lambda: outbox.put(AbortMsg(uid=uid))",
        test=TEST + "test_uids_are_spread_but_a_request_keeps_its_worker",
    ),
    Mutation(
        name="server: an abort goes through another worker than its prompt",
        module="minisgl.server.frontend",
        old="outbox.put(AbortMsg(uid=uid))",
        new="self._text_workers[(uid + 1) % len(self._text_workers)].put(AbortMsg(uid=uid))",
        test=TEST + "test_uids_are_spread_but_a_request_keeps_its_worker",
    ),
    Mutation(
        name="server: text after a stop string goes out",
        module="minisgl.server.worker",
        old="if not already_closed:",
        new="if True:",
        test=TEST + "test_text_worker_stops_at_a_stop_string",
    ),
    Mutation(
        name="server: a stop string does not end the request",
        module="minisgl.server.worker",
        old="if entry.status.stopped and not msg.finished:",
        new="if False:",
        test=TEST + "test_text_worker_stops_at_a_stop_string",
    ),
    Mutation(
        name="server: text that was held back is lost at the end",
        module="minisgl.server.worker",
        old='text += "" if entry.stopped else entry.status.finish()',
        new='text += ""',
        test=TEST + "test_text_worker_gives_what_it_held_back",
    ),
    Mutation(
        name="server: a dead worker leaves its clients waiting",
        module="minisgl.server.frontend",
        old="for uid, stream in self._streams.items():",
        new="for uid, stream in []:",
        test=TEST + "test_dead_worker_is_a_503_for_all",
    ),
    Mutation(
        name="server: a worker outlives its parent",
        module="minisgl.server.channels",
        old="return [ExitMsg()]",
        new="return []",
        test=TEST + "test_channel_leaves_when_its_parent_is_gone",
    ),
    Mutation(
        name="server: any key opens the door",
        module="minisgl.server.api",
        old="if settings.api_key is not None and given !=",
        new="if settings.api_key is None and given !=",
        test=TEST + "test_key_and_model_name_are_checked",
    ),
    Mutation(
        name="server: a fault of ours leaves a stream waiting",
        module="minisgl.server.api",
        old="except Exception as failure:",
        new="except RequestFailed as failure:",
        test=TEST + "test_fault_of_ours_ends_a_stream",
    ),
    Mutation(
        name="server: a hopeless text is encoded",
        module="minisgl.server.worker",
        old="if size <= self._max_chars:",
        new="if True:",
        test=TEST + "test_hopeless_text_is_refused_unread",
    ),
    Mutation(
        name="server: half a character reaches the queues",
        module="minisgl.server.schemas",
        old='raise ValueError(f"unpaired surrogate at character {error.start}") from None',
        new="pass",
        test=TEST + "test_half_a_character_is_no_text",
    ),
]
