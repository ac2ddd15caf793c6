"""The main function of a text worker's process.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.engine.heap import frozen_heap
from minisgl.runtime.supervisor import WorkerContext
from minisgl.server.channels import Gathered, ZmqInbox, ZmqOutbox
from minisgl.server.launch import Addresses
from minisgl.server.worker import TextWorker, run_text_worker
from minisgl.tokenizer import Tokenizer


def text_part(
    config: ServerConfig, addresses: Addresses, index: int, context: WorkerContext
) -> None:
    """Text worker: index -1 is the one that detokenizes, 0… are extra tokenizers."""
    inbox = ZmqInbox(addresses.detokenizer if index < 0 else addresses.tokenizers[index])
    to_scheduler, to_frontend = ZmqOutbox(addresses.scheduler), ZmqOutbox(addresses.frontend)
    path = resolve_model_path(config.model_path)
    window = max_seq_len(config, ModelConfig.from_path(path))
    gathered = Gathered(to_frontend)
    worker = TextWorker(Tokenizer(path), to_scheduler, gathered, window)
    with frozen_heap():
        context.ready()
        run_text_worker(worker, inbox, lambda: True, context.beat, gathered.flush)
    for box in (inbox, to_scheduler, to_frontend):
        box.close()
