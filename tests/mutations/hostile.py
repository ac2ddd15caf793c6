"""Faults by which one client could harm the others, which a test must notice."""

from tests.mutations import Mutation

TEST = "tests/test_hostile.py::"

MUTATIONS = [
    Mutation(
        name="bodies: a list collects all of its errors",
        module="minisgl.server.http.bodies",
        old='found["fail_fast"] = True',
        new="pass",
        test=TEST + "test_an_invalid_body_costs_little",
    ),
    Mutation(
        name="bodies: an object may have any number of fields",
        module="minisgl.server.http.bodies",
        old="isinstance(given, dict) and len(given) > most",
        new="False",
        test=TEST + "test_an_invalid_body_costs_little",
    ),
    Mutation(
        name="bodies: values are not counted before they are parsed",
        module="minisgl.server.http.bodies",
        old="        if number > most:",
        new="        if False:",
        test=TEST + "test_values_are_counted_before_they_are_parsed",
    ),
    Mutation(
        name="bodies: commas of a text count as values",
        module="minisgl.server.http.bodies",
        old="2 * MAX_VALUES)[::2]",
        new="2 * MAX_VALUES)",
        test=TEST + "test_values_are_counted_before_they_are_parsed",
    ),
    Mutation(
        name="bodies: large ones are parsed on the event loop",
        module="minisgl.server.http.bodies",
        old="len(body) <= INLINE_BYTES and count(body)[0] <= INLINE_VALUES",
        new="True",
        test=TEST + "test_large_bodies_are_parsed_beside_the_event_loop",
    ),
    Mutation(
        name="bodies: one client keeps the thread to itself",
        module="minisgl.server.http.bodies",
        old="async with turn:",
        new="if turn:",
        test=TEST + "test_jobs_of_one_client_wait_for_each_other",
    ),
    Mutation(
        name="bodies: an error writes all of a value",
        module="minisgl.server.http.bodies",
        old="{Short().repr(first.get('input')):.80}",
        new="{first.get('input')!r:.80}",
        test=TEST + "test_an_error_shows_little_of_what_was_sent",
    ),
    Mutation(
        name="shares: one client takes all places",
        module="minisgl.server.http.limits",
        old="held > self.factor * free",
        new="False",
        test=TEST + "test_one_client_cannot_take_all_places",
    ),
    Mutation(
        name="shares: bodies on their way in are not counted",
        module="minisgl.server.http.limits",
        old="if more and not self._limit._shares.take(self._client, more):",
        new="if False:",
        test=TEST + "test_one_client_cannot_fill_the_memory_with_bodies",
    ),
    Mutation(
        name="heads: a head has no end",
        module="minisgl.server.http.limits",
        old="if self._idle > MAX_HEAD and not self._refused:",
        new="if False:",
        test=TEST + "test_heads_and_trailers_are_bounded",
    ),
    Mutation(
        name="heads: a whole head may be large",
        module="minisgl.server.http.limits",
        old="    if self._head > MAX_HEAD:\n        self._refuse_head()\n        return",
        new="    pass",
        test=TEST + "test_heads_and_trailers_are_bounded",
    ),
    Mutation(
        name="connections: one address takes all of them",
        module="minisgl.server.http.limits",
        old="if not self._placed:",
        new="if False:",
        test=TEST + "test_connections_are_places",
    ),
    Mutation(
        name="pages: any site may use a server without a key",
        module="minisgl.server.http.access",
        old="if refusal is None:",
        new="if True:",
        test=TEST + "test_pages_of_other_sites_are_refused",
    ),
    Mutation(
        name="keys: a header need not be able to carry a key",
        module="minisgl.server.http.access",
        old="if not key or not key.isprintable() or any(c.isspace() for c in key):",
        new="if False:",
        test=TEST + "test_keys_that_can_never_match_are_refused",
    ),
    Mutation(
        name="keys: a proxy gets what is meant for this machine",
        module="minisgl.server.chat.client",
        old="trust_env=not here",
        new="trust_env=True",
        test=TEST + "test_no_proxy_sees_what_stays_on_this_machine",
    ),
]
