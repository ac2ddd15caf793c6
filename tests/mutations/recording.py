"""Bugs on purpose in events, recordings and the viewer's page."""

from __future__ import annotations

from tests.mutations import Mutation

TESTS = "tests/test_recording.py::"
REPLAY = TESTS + "test_replay_follows_the_engine"
RADIX, MANAGER = "minisgl.kvcache.radix_cache", "minisgl.kvcache.cache_manager"

MUTATIONS = [
    Mutation(
        "recording: the events of an idle server wait for the next request",
        "minisgl.server.workers.scheduler_process",
        "        self._flush()\n",
        "",
        "tests/test_recording.py::test_a_report_writes_what_an_idle_server_has_recorded",
    ),
    Mutation(
        "events: a split counts tokens for pages",
        RADIX,
        "self.emit(events.NodeSplit(self.first_page(upper), at // self.page_size))",
        "self.emit(events.NodeSplit(self.first_page(upper), at))",
        REPLAY,
    ),
    Mutation(
        "events: a use is not reported",
        RADIX,
        "self.emit(events.NodeUsed(self.first_page(node)))",
        "pass",
        REPLAY,
    ),
    Mutation(
        "events: an unlock is not reported",
        RADIX,
        "self.emit(events.NodeLocked(self.first_page(path[0]), -1))",
        "pass",
        REPLAY,
    ),
    Mutation(
        "events: a rewritten row is not reported",
        MANAGER,
        "self.emit(events.PagesCached(req.uid, events.pages_of(new.slots(), self.page_size)))",
        "pass",
        REPLAY,
    ),
    Mutation(
        "events: a retraction is not reported",
        "minisgl.scheduler.retraction",
        "scheduler.emit(RequestRetracted(req.uid))",
        "pass",
        TESTS + "test_retraction_is_replayed",
    ),
    Mutation(
        "recording: prompts are always in it",
        "minisgl.recording",
        "if type(event) is RequestAdded and not self.text:",
        "if False:",
        TESTS + "test_prompts_are_recorded_only_when_asked_for",
    ),
    Mutation(
        "recording: it grows without a bound",
        "minisgl.recording",
        "whole if whole <= self.left else",
        "whole if True else",
        TESTS + "test_a_recording_is_bounded_and_may_end_anywhere",
    ),
    Mutation(
        "recording: a full file ends in the middle of a line",
        "minisgl.recording",
        'self.buffer.rfind(b"\\n", 0, max(0, self.left)) + 1',
        "max(0, self.left)",
        TESTS + "test_a_recording_is_bounded_and_may_end_anywhere",
    ),
    Mutation(
        "recording: a half-written line is read",
        "minisgl.recording",
        "for line in lines[:-1]",
        "for line in lines",
        TESTS + "test_a_recording_is_bounded_and_may_end_anywhere",
    ),
]
