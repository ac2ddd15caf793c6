"""Faults in how chats and grammars of strangers are kept from harming others."""

from tests.mutations import Mutation

SIDE, TEST = "minisgl.scheduler.side", "tests/test_side.py::"
TEXT, PROCESS = "minisgl.server.workers.text_worker", "minisgl.server.workers.prompt_threads"

MUTATIONS = [
    Mutation(
        "side: a job may take any time",
        SIDE,
        "if not self._pipe.poll(seconds):",
        "if False:",
        TEST + "test_a_grammar_has_a_deadline",
    ),
    Mutation(
        "side: grammars are not tried before the scheduler compiles them",
        SIDE,
        "text, *_ = self.side.measure_grammar(params)",
        'text = params.grammar or ""',
        TEST + "test_a_grammar_has_a_deadline",
    ),
    Mutation(
        "side: an error that quotes half a character ends a process",
        "minisgl.scheduler.side_process",
        'text.encode(errors="backslashreplace").decode()',
        "text",
        TEST + "test_an_error_that_quotes_half_a_character_is_an_answer",
    ),
    Mutation(
        "side: a late process is used again",
        SIDE,
        """        except (OSError, EOFError):
            process.end()
""",
        """        except (OSError, EOFError):
            self._idle.append(process)
""",
        TEST + "test_a_late_job_ends_with_its_process_and_the_next_one_is_served",
    ),
    Mutation(
        "side: the first failure of a process is an error of whoever comes next",
        SIDE,
        "                if fresh:\n",
        "                if True:\n",
        TEST + "test_a_process_that_has_died_is_replaced",
    ),
    Mutation(
        "side: a job that nobody waits for runs on",
        "minisgl.scheduler.side_process",
        "limit_work(seconds / CPU_SHARE, ",
        "limit_work(60, ",
        TEST + "test_the_kernel_ends_a_job_that_nobody_waits_for",
    ),
    Mutation(
        "side: a template runs beside the API keys",
        SIDE,
        "for name in KEPT if name in os.environ",
        "for name in os.environ",
        TEST + "test_a_side_process_gets_no_secrets",
    ),
    Mutation(
        "lanes: chats are rendered in the loop of the text worker",
        TEXT,
        "size > self.quick or msg.messages or ",
        "size > self.quick or ",
        TEST + "test_chats_and_grammars_go_aside",
    ),
    Mutation(
        "lanes: one client occupies all threads",
        PROCESS,
        "if held[client] >= free)",
        "if held[client] > self._count)",
        TEST + "test_one_client_occupies_half_of_the_threads",
    ),
]
