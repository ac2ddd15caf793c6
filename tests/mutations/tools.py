"""Faults of tool calls and of thoughts that a test must notice."""

from tests.mutations import Mutation

HTTP, TEST = "minisgl.server.http.", "tests/test_tools.py::"

MUTATIONS = [
    Mutation(
        name="tools: a beginning of a marker is shown",
        module=HTTP + "tool_parser",
        old="held = 0 if last else max(",
        new="held = 0 * max(",
        test=TEST + "test_calls_are_found_in_every_chunking",
    ),
    Mutation(
        name="tools: a function that is not there is called",
        module=HTTP + "tool_parser",
        old='if match["name"] not in self.names:',
        new="if False:",
        test=TEST + "test_what_is_no_call_is_content_to_the_letter",
    ),
    Mutation(
        name="tools: a marker that begins no call is lost",
        module=HTTP + "tool_parser",
        old="text = self.marker + self.buffer[: max(size, not self.marker)]",
        new="text, self.marker = self.buffer[: max(size, 1)], ''",
        test=TEST + "test_what_is_no_call_is_content_to_the_letter",
    ),
    Mutation(
        name="tools: white space before a call is content",
        module=HTTP + "tool_parser",
        old='self.calls + 1, "", self.buffer[size:]',
        new="self.calls + 1, self.blank, self.buffer[size:]",
        test=TEST + "test_calls_are_found_in_every_chunking",
    ),
    Mutation(
        name="tools: a backslash before a quote is nothing",
        module=HTTP + "tool_parser",
        old='self.escaped, self.quoted = char == "\\\\", char != \'"\'',
        new="self.quoted = char != '\"'",
        test=TEST + "test_calls_are_found_in_every_chunking",
    ),
    Mutation(
        name="tools: held text is looked at again and again",
        module=HTTP + "tool_parser",
        old="end = self.object.find(body[self.seen :])",
        new="self.object, self.seen = ObjectEnd(), 0; end = self.object.find(body)",
        test=TEST + "test_long_arguments_are_looked_at_once",
    ),
    Mutation(
        name="tools: a thought of the prompt is content",
        module=HTTP + "chats",
        old="self.opened = self.opened or thinking",
        new="pass",
        test=TEST + "test_thoughts_are_split_off",
    ),
    Mutation(
        name="tools: a cut answer ends in calls",
        module=HTTP + "chats",
        old='if called and finish_reason == "stop"',
        new="if called",
        test=TEST + "test_messages_are_shaped_as_openai_does",
    ),
    Mutation(
        name="tools: strict functions are held to nothing",
        module=HTTP + "tools",
        old="if self.required or tool.function.strict",
        new="if self.required",
        test=TEST + "test_auto_answers_freely_unless_a_promise_is_made",
    ),
    Mutation(
        name="tools: what is not allowed may be called",
        module=HTTP + "tools",
        old="fewer = len(self.callable) < len(self.tools)",
        new="fewer = False",
        test=TEST + "test_auto_answers_freely_unless_a_promise_is_made",
    ),
    Mutation(
        name="tools: two functions share a name",
        module=HTTP + "tools",
        old="if names.count(name) > 1",
        new="if False",
        test=TEST + "test_bad_tools_are_refused_by_name",
    ),
    Mutation(
        name="tools: a tag that cannot be compiled names itself",
        module="minisgl.scheduler.forms",
        old="tag_of(text).get('name', field)",
        new="field",
        test=TEST + "test_tags_that_cannot_be_used_are_refused",
    ),
    Mutation(
        name="tools: special tokens are spelled in a tag",
        module="minisgl.scheduler.forms",
        old="            if special:\n",
        new="            if False:\n",
        test=TEST + "test_a_random_model_calls_if_it_must[hermes]",
    ),
    Mutation(
        name="tools: a grammar forgets the thought of the prompt",
        module="minisgl.scheduler.grammar",
        old="                    matcher.ll.consume_tokens(tail)\n",
        new="                    pass\n",
        test=TEST + "test_a_grammar_begins_in_the_prompts_thought",
    ),
    Mutation(
        name="tools: special markers are no text",
        module="minisgl.tokenizer",
        old='token["special"] &= token["content"] not in MARKERS',
        new="pass",
        test=TEST + "test_markers_are_text_though_they_are_special_tokens",
    ),
    Mutation(
        name="tools: arguments reach the template as text",
        module="minisgl.tokenizer",
        old="arguments = found if isinstance(found, dict) else given",
        new="arguments = given",
        test=TEST + "test_arguments_are_a_mapping_for_the_template",
    ),
    Mutation(
        name="forms: a schema beside json_object is dropped",
        module=HTTP + "tools",
        old="if schema is not None or self.type",
        new="if self.type",
        test="tests/test_server_llama.py::test_forms_of_answers",
    ),
    Mutation(
        name="forms: an unknown name is dropped",
        module=HTTP + "tools",
        old='class ResponseFormat(BaseModel, extra="forbid"):',
        new="class ResponseFormat(BaseModel):",
        test="tests/test_server_llama.py::test_forms_of_answers",
    ),
]
