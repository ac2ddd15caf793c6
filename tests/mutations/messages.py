"""Faults of `/v1/messages` and of the routes that convert, which a test must notice."""

from tests.mutations import Mutation

TEST = "tests/test_server_messages.py::"
EVENTS, SCHEMAS = "minisgl.server.messages.events", "minisgl.server.messages.schemas"

MUTATIONS = [
    Mutation(
        name="messages: a thought goes on as text",
        module=EVENTS,
        old='if self._block is None or self._block["type"] != kind:',
        new="if self._block is None:",
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="messages: an event that was sent changes later",
        module=EVENTS,
        old='done = [*self.message["content"], {**self._block, **filled}]',
        new='done = self.message["content"]; done.append({**self._block, **filled})',
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="messages: the text between two results comes last",
        module=SCHEMAS,
        old="            if text:\n",
        new="            if text and block is None:\n",
        test=TEST + "test_a_request_as_a_chat",
    ),
    Mutation(
        name="messages: a failed tool looks like one that did well",
        module=SCHEMAS,
        old='"Error: " * bool(block.is_error) + ',
        new="",
        test=TEST + "test_a_request_as_a_chat",
    ),
]
