"""Faults of `/v1/responses` that a test must notice."""

from tests.mutations import Mutation

TEST = "tests/test_server_responses.py::"
EVENTS = "minisgl.server.responses.events"
ROUTES = "minisgl.server.responses.routes"
TRANSLATED = "minisgl.server.http.translated"
SCHEMAS = "minisgl.server.responses.schemas"
STORE = "minisgl.server.responses.store"

MUTATIONS = [
    Mutation(
        name="responses: an event that was told changes later",
        module=EVENTS,
        old='self.response = {**self.response, "output": [*self.response["output"], self._item]}',
        new='self.response["output"].append(self._item)',
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="responses: the first piece is not in the whole",
        module=EVENTS,
        old='"".join(self._text)',
        new='"".join(self._text[1:])',
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="responses: a thought goes on as a message",
        module=EVENTS,
        old='if self._item.get("type") != new["type"]:',
        new="if not self._item:",
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="responses: thoughts are not counted",
        module="minisgl.server.http.formats",
        old="        self.reasoning_tokens = reply.completion_tokens\n",
        new="        pass\n",
        test=TEST + "test_log_probabilities_and_counts_of_a_thoughtful_answer",
    ),
    Mutation(
        name="responses: a thought that came with its answer has no tokens",
        module="minisgl.server.http.formats",
        old="        self.reasoning_tokens = reply.thought_tokens\n",
        new="        pass\n",
        test=TEST + "test_tokens_of_a_thought_are_counted_in_a_reply_that_holds_it_whole",
    ),
    Mutation(
        name="responses: events have no numbers",
        module=EVENTS,
        old="next(self._numbers)",
        new="0",
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="responses: an answer that was cut counts as complete",
        module=EVENTS,
        old='status = "incomplete" if cut else "completed"',
        new='status = "completed"',
        test=TEST + "test_pieces_add_up",
    ),
    Mutation(
        name="responses: to use a response is to use its last turn alone",
        module=STORE,
        old="order.move_to_end(response_id)",
        new="found or order.move_to_end(response_id)",
        test=TEST + "test_what_is_kept_can_be_continued",
    ),
    Mutation(
        name="responses: the store has no bound",
        module=STORE,
        old="while self.size > self._max_bytes:",
        new="while False:",
        test=TEST + "test_what_is_kept_can_be_continued",
    ),
    Mutation(
        name="responses: time runs from the first use",
        module=STORE,
        old="            entry.expires = now + self._seconds\n",
        new="",
        test=TEST + "test_time_runs_from_the_last_use",
    ),
    Mutation(
        name="responses: a deleted response still counts",
        module=STORE,
        old="    self._held[entry.client] -= len(entry.data)\n",
        new="    pass\n",
        test=TEST + "test_what_is_kept_can_be_continued",
    ),
    Mutation(
        name="responses: a client reads what another has stored",
        module=STORE,
        old="response_id in self._own.get(client, ())",
        new="response_id in self._entries",
        test=TEST + "test_clients_have_stores_of_their_own",
    ),
    Mutation(
        name="responses: a client evicts what another has stored",
        module=STORE,
        old="self._drop(next(iter(self._own[most])))",
        new="self._drop(next(iter(self._entries)))",
        test=TEST + "test_clients_have_stores_of_their_own",
    ),
    Mutation(
        name="responses: a newcomer finds no room in a full store",
        module=STORE,
        old="iter(self._own[most])",
        new="iter(self._own[client])",
        test=TEST + "test_who_holds_no_more_than_an_equal_share_loses_nothing_to_others",
    ),
    Mutation(
        name="responses: any client makes room for a newcomer",
        module=STORE,
        old="most = max(held,",
        new="most = min(held,",
        test=TEST + "test_clients_have_stores_of_their_own",
    ),
    Mutation(
        name="responses: a client as small makes room",
        module=STORE,
        old="(held[each], each == client)",
        new="held[each]",
        test=TEST + "test_of_equal_clients_none_makes_room_for_another",
    ),
    Mutation(
        name="responses: a second reference to an item costs nothing",
        module=ROUTES,
        old="self._count(msgspec.json.encode(item))",
        new="pass",
        test=TEST + "test_one_request_reads_a_bounded_part_of_the_store",
    ),
    Mutation(
        name="responses: stored turns are read on the event loop",
        module=ROUTES,
        old="large=body.reads_stored_turns",
        new="large=False",
        test=TEST + "test_stored_turns_are_read_beside_the_event_loop",
    ),
    Mutation(
        name="responses: store=false is stored",
        module=ROUTES,
        old='if self.builder.response["store"]:',
        new="if True:",
        test=TEST + "test_create_and_continue_with_the_sdk",
    ),
    Mutation(
        name="responses: a failure in the middle ends without its event",
        module=TRANSLATED,
        old="if not self.builder.begun:",
        new="if True:",
        test=TEST + "test_a_failure_in_the_middle_is_told",
    ),
    Mutation(
        name="responses: ids are short",
        module=ROUTES,
        old="secrets.token_hex(16)",
        new="secrets.token_hex(4)",
        test=TEST + "test_ids_cannot_be_guessed",
    ),
    Mutation(
        name="responses: errors speak of a chat's fields",
        module="minisgl.server.http.bodies",
        old='if name := names.get(error.param or ""):',
        new="if False:",
        test=TEST + "test_what_is_refused_is_named",
    ),
    Mutation(
        name="responses: a chat's name for a field is dropped",
        module="minisgl.server.http.fields",
        old="if name in here and value not in",
        new="if False and value not in",
        test=TEST + "test_fields_are_treated_as_the_tables_say",
    ),
    Mutation(
        name="responses: two answers are mixed to one",
        module=TRANSLATED,
        old="if self.chat.n not in (None, 1):",
        new="if False:",
        test=TEST + "test_what_is_refused_is_named",
    ),
    Mutation(
        name="responses: templates see the role developer",
        module="minisgl.tokenizer",
        old="role = roles.get(role, role)",
        new="pass",
        test="tests/test_server_dialects.py::"
        "test_roles_and_thoughts_have_the_names_that_templates_read",
    ),
    Mutation(
        name="responses: two calls of one turn are two turns",
        module=SCHEMAS,
        old='elif "tool_calls" in message:',
        new="elif False:",
        test=TEST + "test_items_become_messages",
    ),
    Mutation(
        name="responses: a conversation that is read does not count",
        module=STORE,
        old="        hold(size)\n",
        new="",
        test=TEST + "test_turns_count_before_they_are_read",
    ),
    Mutation(
        name="responses: turns that items refer to do not count",
        module=ROUTES,
        old="        self._hold(len(data))\n",
        new="",
        test=TEST + "test_turns_count_before_they_are_read",
    ),
    Mutation(
        name="responses: what a request reads counts in no share",
        module=ROUTES,
        old="hold = request.scope.get(HOLD, lambda size: None)",
        new="hold = int",
        test=TEST + "test_stored_turns_count_while_a_request_that_reads_them_runs",
    ),
]
