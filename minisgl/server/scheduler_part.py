"""The scheduler behind a channel: the main function of a process, or threads for a notebook.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from minisgl.config import ServerConfig, resolve_model_path
from minisgl.distributed.comm import Comm
from minisgl.distributed.ranks import Ranks, run_loop
from minisgl.scheduler.channel import Channel
from minisgl.scheduler.messages import ExitMsg
from minisgl.scheduler.scheduler import build_scheduler
from minisgl.server.channels import QueueBox, SchedulerChannel, ZmqInbox, ZmqOutbox
from minisgl.server.frontend import Frontend
from minisgl.server.parts import Addresses, parent_alive
from minisgl.server.worker import TextWorker, run_text_worker
from minisgl.tokenizer import Tokenizer


class ThreadedServer:
    """All parts in threads of this process: for notebooks, tests and small tools. One rank.

    The scheduler and the text worker are the ones that serve; only the boxes differ.
    """

    def __init__(self, config: ServerConfig) -> None:
        to_scheduler, to_text, to_frontend = QueueBox(), QueueBox(), QueueBox()
        self._to_scheduler, self._to_text = to_scheduler, to_text
        self._overlap = config.overlap
        self.scheduler = build_scheduler(config, SchedulerChannel(to_scheduler, to_text))
        tokenizer = Tokenizer(resolve_model_path(config.model_path))
        window = self.scheduler.limits.max_seq_len
        self._worker = TextWorker(tokenizer, to_scheduler, to_frontend, window)
        self.frontend = Frontend([to_text], to_frontend)
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
            run_loop(self.scheduler, self._overlap)
        except Exception as error:
            traceback.print_exc()
            self.frontend.fail_all(f"the scheduler died: {error}")

    def _run_text(self) -> None:
        run_text_worker(self._worker, self._to_text, alive=lambda: True)


def scheduler_part(
    config: ServerConfig, addresses: Addresses, index: int, ready: Callable[[], None]
) -> None:
    """The scheduler's process: the only rank, or rank 0, which starts the others and leads them."""
    outer = SchedulerChannel(
        ZmqInbox(addresses.scheduler), ZmqOutbox(addresses.detokenizer), parent_alive
    )
    with ExitStack() as stack:
        stack.callback(outer.close)
        channel: Channel = outer
        comm: Comm | None = None
        if config.tp.size > 1:
            ranks = stack.enter_context(Ranks(config))
            channel, comm = ranks.channel(outer), ranks.comm
        scheduler = build_scheduler(config, channel, comm)
        ready()
        run_loop(scheduler, config.overlap)
