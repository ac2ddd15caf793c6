"""A whole server in the threads of one process: for notebooks, tests and small tools.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence

from minisgl.config.engine import ServerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.guarded import guarded
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.grammar_queue import GrammarQueue
from minisgl.scheduler.messages import ExitMsg
from minisgl.scheduler.side import SideTokenizer
from minisgl.server.frontend import Frontend, Observer
from minisgl.server.workers.channels import LocalQueue
from minisgl.server.workers.prompt_threads import PromptThreads
from minisgl.server.workers.scheduler_process import Reporter, SchedulerChannel
from minisgl.server.workers.text_process import build_text_worker
from minisgl.server.workers.text_worker import PromptQueue, run_text_worker


class InProcessServer:
    """A scheduler and a text worker in threads, and a frontend for them. One rank."""

    def __init__(
        self, config: ServerConfig, observers: Sequence[Observer] = (), traced: bool = False
    ) -> None:
        self.to_scheduler, self.to_text, to_frontend = LocalQueue(), LocalQueue(), LocalQueue()
        hold, reporter = GrammarQueue(), Reporter(traced)
        channel = SchedulerChannel(self.to_scheduler, self.to_text, hold=hold)
        channel.report = guarded(reporter)
        self.scheduler = build_scheduler(config, channel, observe=reporter.observe, hold=hold)
        reporter.scheduler = self.scheduler
        self._tokenizer = SideTokenizer(resolve_model_path(config.model_path))
        window = self.scheduler.engine.max_seq_len
        worker = build_text_worker(self._tokenizer, self.to_scheduler, to_frontend, window)
        threads = PromptThreads(side=self._tokenizer.side)
        prompts = PromptQueue(threads, self._tokenizer.quick)
        loop = {"worker": worker, "inbox": self.to_text, "prompts": prompts}
        self.frontend = Frontend([self.to_text], to_frontend, observers)
        self._threads = [
            threading.Thread(target=self._run_scheduler, name="scheduler", daemon=True),
            threading.Thread(target=run_text_worker, kwargs=loop, daemon=True),
        ]

    def _run_scheduler(self) -> None:
        try:
            self.scheduler.run()
        except Exception as error:
            traceback.print_exc()
            if self.frontend.loop is not None:
                why = f"the scheduler died: {error}"
                self.frontend.loop.call_soon_threadsafe(self.frontend.fail_all, why)

    def __enter__(self) -> InProcessServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for box, thread in zip((self.to_scheduler, self.to_text), self._threads, strict=True):
            box.put(ExitMsg())
            thread.join(timeout=10)
        self._tokenizer.side.close()
