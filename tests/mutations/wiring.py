"""Defences that are built and tested, but left out of the server."""

from tests.mutations import Mutation

TEST = "tests/test_wiring.py::"
LIMITS = "test_a_server_has_every_limit_that_its_flags_set"
ROUTES = "test_every_route_of_a_server_is_behind_its_defences"
TEXT = "test_a_text_process_has_its_side_process_and_its_threads"
CLI, HTTP, LIMIT = "minisgl.server.cli", "minisgl.server.http.api", "minisgl.server.http.limits"

LEFT_OUT = [  # a module, its text, what stands there instead, a test
    (CLI, "frontend = FairFrontend(", "frontend = Frontend(", LIMITS),
    (CLI, "config.max_running_req + operations.max_queue, ", "", LIMITS),
    (CLI, ", reason=LOADING)", ")", LIMITS),
    (CLI, "operations.stall_timeout, ", "30.0, ", LIMITS),
    (CLI, "operations.trusted_proxies))", "None))", LIMITS),
    (CLI, "drain_timeout=operations.drain_timeout", "drain_timeout=18.0", LIMITS),
    (CLI, "Watchdog(operations.worker_timeout, operations.step_timeout)", "Watchdog(0, 0)", LIMITS),
    (CLI, "path, operations.request_timeout)", "path)", LIMITS),
    (CLI, "return replace(settings, isolate_prefixes=operations.isolate_prefixes)",
     "return settings", LIMITS),
    (CLI, "listen(config.host, ", 'listen("0.0.0.0", ', LIMITS),
    (CLI, "Middleware(LogRequests, notify=frontend.notify), limit]", "limit]", ROUTES),
    (CLI, "Middleware(LogRequests, notify=frontend.notify), limit]",
     "Middleware(LogRequests, notify=frontend.notify)]", ROUTES),
    (CLI, "max_bytes=operations.max_body_size", "max_bytes=2**23", ROUTES),
    (CLI, "if operations.key_for_all and", "if False and", ROUTES),
    (CLI, "Access(settings.keys))\n    return app", "Access({}))\n    return app", ROUTES),
    (CLI, "operations.api_key_file, ", "None, ", ROUTES),
    (CLI, "operations.allow_origin)", "None)", ROUTES),
    (HTTP, "[headers, *middleware, *checks]", "[headers, *middleware]", ROUTES),
    (HTTP, "redirect_slashes=False", "redirect_slashes=True", ROUTES),
    (HTTP, "keyed_route(Access(settings.keys), ", "keyed_route(Access({}), ", ROUTES),
    (LIMIT, "(stall, connections=places)", "(stall)", LIMITS),
    (LIMIT, "proxy_headers=bool(trusted)", "proxy_headers=True", LIMITS),
    (LIMIT, 'ws="none"', 'ws="auto"', LIMITS),
    ("minisgl.server.workers.text_process", "SideTokenizer(path)\n    tokenizer.side.start()",
     "Tokenizer(path)", TEXT),
    ("minisgl.server.workers.text_process", "PromptQueue(PromptThreads(side=tokenizer.side), ",
     "PromptQueue(None, ", TEXT),
    ("minisgl.server.workers.text_process", "(side=tokenizer.side)", "()", TEXT),
    ("minisgl.server.workers.text_process", "    return_free_memory()\n", "", TEXT),
    ("minisgl.server.workers.text_process", "side), tokenizer.quick)", "side))", TEXT),
]  # fmt: skip

MUTATIONS = [
    Mutation(f"wiring: {new.strip()} for {old.strip()}", module, old, new, TEST + test)
    for module, old, new, test in LEFT_OUT
]
