"""The worker processes of a server: their list, their inboxes' addresses, their end.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from minisgl.config.engine import ServerConfig
from minisgl.recording import Observed
from minisgl.runtime.heartbeat import Watchdog
from minisgl.runtime.supervisor import Supervisor, Worker
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.workers.channels import ZmqOutbox

SCHEDULER = "minisgl.server.workers.scheduler_process:scheduler_process"
TEXT = "minisgl.server.workers.text_process:text_process"


def address(folder: Path, part: str) -> str:
    """Return the address of a part's inbox: "scheduler", "text", "tokenizer-0"…, "frontend"."""
    return f"ipc://{folder / part}"


def private_folder() -> Path:
    """Make a private folder for sockets (mode 0700)."""
    # The path of a socket has at most 107 bytes; 32 of them are ours.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 75 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="minisgl-", dir=place))


class WorkerGroup(Supervisor):
    """The worker processes of one server: a scheduler, a text worker, extra tokenizers."""

    def __init__(self, config: ServerConfig, watchdog: Watchdog, observed: Observed) -> None:
        self.folder = private_folder()
        extra = [f"tokenizer-{i}" for i in range(config.num_tokenizer)]
        self.tokenizers = extra or ["text"]  # without extra ones, one worker does both jobs
        parts: list[tuple[str, str, object]] = [(SCHEDULER, "scheduler", observed)]
        parts += [(TEXT, "text worker", "text")]
        parts += [(TEXT, part.replace("-", " "), part) for part in extra]
        workers = [Worker(name, entry, (config, self.folder, arg)) for entry, name, arg in parts]
        super().__init__(workers, watchdog=watchdog, folder=self.folder)

    def request_exit(self) -> None:
        """Send an `ExitMsg` to every inbox."""
        for part in {"scheduler", "text", *self.tokenizers}:
            box = ZmqOutbox(address(self.folder, part))
            box.put(ExitMsg())
            box.close()
