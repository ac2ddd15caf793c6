"""The worker processes of a server: which there are, where their inboxes listen, how they end.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from minisgl.config.engine import ServerConfig
from minisgl.runtime.heartbeat import Watchdog
from minisgl.runtime.supervisor import Supervisor, Worker
from minisgl.scheduler.messages import ExitMsg
from minisgl.server.workers.channels import ZmqOutbox

SCHEDULER = "minisgl.server.workers.scheduler_process:scheduler_process"
TEXT = "minisgl.server.workers.text_process:text_process"


@dataclass(frozen=True)
class Addresses:
    """Where each inbox listens. With no extra tokenizers, one text worker does both jobs."""

    scheduler: str
    detokenizer: str
    tokenizers: tuple[str, ...]
    frontend: str

    @classmethod
    def in_folder(cls, folder: Path, num_tokenizer: int) -> Addresses:
        def name(part: str) -> str:
            return f"ipc://{folder / part}"

        extra = tuple(name(f"tokenizer-{i}") for i in range(num_tokenizer))
        return cls(name("scheduler"), name("text"), extra or (name("text"),), name("frontend"))


def private_folder() -> Path:
    """A new folder for sockets that its owner alone may enter (mode 0700)."""
    # The path of a socket has at most 107 bytes; 32 of them are ours.
    place = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 75 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="minisgl-", dir=place))


class WorkerGroup(Supervisor):
    """The worker processes of one server: a scheduler, a text worker, extra tokenizers."""

    def __init__(self, config: ServerConfig, watchdog: Watchdog, *, traced: bool = False) -> None:
        self.folder = private_folder()
        self.addresses = Addresses.in_folder(self.folder, config.num_tokenizer)
        parts = [(SCHEDULER, "scheduler", int(traced)), (TEXT, "text worker", -1)]
        parts += [(TEXT, f"tokenizer {i}", i) for i in range(config.num_tokenizer)]
        workers = [
            Worker(name, entry, (config, self.addresses, index)) for entry, name, index in parts
        ]
        super().__init__(workers, watchdog=watchdog, folder=self.folder)

    def ask_to_leave(self) -> None:
        """An `ExitMsg` to every inbox."""
        addresses = self.addresses
        for address in {addresses.scheduler, addresses.detokenizer, *addresses.tokenizers}:
            box = ZmqOutbox(address)
            box.put(ExitMsg())
            box.close()
