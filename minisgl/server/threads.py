"""A whole server in the threads of one process: for notebooks, tests and small tools.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence

from minisgl.config.engine import ServerConfig
from minisgl.config.paths import resolve_model_path
from minisgl.runtime.ranks import run_loop
from minisgl.scheduler.build import build_scheduler
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.channels import QueueBox, SchedulerChannel
from minisgl.server.frontend import Frontend, Observer
from minisgl.server.stats import Reporter
from minisgl.server.worker import TextWorker, run_text_worker
from minisgl.tokenizer import Tokenizer


class ThreadedServer:
    """All parts in threads of this process: for notebooks, tests and small tools. One rank.

    The scheduler and the text worker are the ones that serve; only the boxes differ.
    """

    def __init__(
        self, config: ServerConfig, observers: Sequence[Observer] = (), traced: bool = False
    ) -> None:
        to_scheduler, to_text, to_frontend = QueueBox(), QueueBox(), QueueBox()
        self._to_scheduler, self._to_text = to_scheduler, to_text
        channel = SchedulerChannel(to_scheduler, to_text)
        channel.report = reporter = Reporter(traced)
        self.scheduler = build_scheduler(config, channel, trace=reporter.trace)
        reporter.scheduler = self.scheduler
        tokenizer = Tokenizer(resolve_model_path(config.model_path))
        window = self.scheduler.engine.max_seq_len
        self._worker = TextWorker(tokenizer, to_scheduler, to_frontend, window)
        self.frontend = Frontend([to_text], to_frontend, observers)
        self._threads = [
            threading.Thread(target=self._run_scheduler, name="scheduler", daemon=True),
            threading.Thread(target=self._run_text, name="text", daemon=True),
        ]

    def __enter__(self) -> ThreadedServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._to_scheduler.put(ExitMsg())
        self._to_text.put(ExitMsg())
        for thread in self._threads:
            thread.join(timeout=10)

    def _run_scheduler(self) -> None:
        """A scheduler that fails takes no caller with it: all streams end with the reason."""
        try:
            run_loop(self.scheduler, self.scheduler.overlap)
        except Exception as error:
            traceback.print_exc()
            self.frontend.fail_soon(f"the scheduler died: {error}")

    def _run_text(self) -> None:
        run_text_worker(self._worker, self._to_text, alive=lambda: True)
