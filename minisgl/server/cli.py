"""The command line: flags to a `ServerConfig`, then serve over HTTP or chat in the terminal.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from minisgl.config import ModelConfig, ServerConfig, TPInfo, max_seq_len, resolve_model_path
from minisgl.core import SamplingParams
from minisgl.server.api import ApiSettings, create_app
from minisgl.server.channels import ZmqInbox, ZmqOutbox
from minisgl.server.frontend import Frontend
from minisgl.server.launch import StartFailed, WorkerGroup
from minisgl.server.shell import run_shell


def build_parser() -> argparse.ArgumentParser:
    """Every flag, with its default in the help."""
    parser = argparse.ArgumentParser(
        prog="python -m minisgl",
        description="Serve a language model over an OpenAI-compatible API, or chat (--shell).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_flags(parser.add_argument_group("model"))
    add_engine_flags(parser.add_argument_group("engine"))
    add_server_flags(parser.add_argument_group("server"))
    return parser


def add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-path",
        "--model",
        metavar="PATH",
        default=None,
        help="folder in Hugging Face layout, or a hub id; none: the small model in the package",
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument(
        "--tensor-parallel-size",
        "--tp",
        metavar="N",
        type=int,
        default=1,
        help="ranks, one per GPU",
    )
    group.add_argument(
        "--dummy-weight",
        action="store_true",
        help="random weights of the model's shapes, to measure speed",
    )
    group.add_argument(
        "--max-seq-len-override",
        metavar="N",
        type=int,
        default=None,
        help="context window in tokens",
    )


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attention-backend",
        "--attn",
        metavar="NAME",
        default="auto",
        help="auto, torch, triton, fi, or two for prefill,decode",
    )
    group.add_argument(
        "--cache-type", choices=["radix", "hash", "naive"], default="radix", help="prefix cache"
    )
    group.add_argument(
        "--page-size", metavar="N", type=int, default=None, help="tokens per KV page"
    )
    group.add_argument(
        "--num-pages",
        metavar="N",
        type=int,
        default=None,
        help="KV pages; none: what memory allows",
    )
    group.add_argument(
        "--memory-ratio",
        metavar="R",
        type=float,
        default=0.9,
        help="share of memory for weights and KV",
    )
    group.add_argument(
        "--max-running-requests", metavar="N", type=int, default=256, help="requests in one batch"
    )
    group.add_argument(
        "--max-prefill-length", metavar="N", type=int, default=8192, help="prompt tokens per step"
    )
    group.add_argument(
        "--cuda-graph-max-bs",
        metavar="N",
        type=int,
        default=None,
        help="largest captured batch; 0: none",
    )
    group.add_argument(
        "--disable-overlap", action="store_true", help="schedule and compute in turns"
    )


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    group.add_argument("--port", type=int, default=1919, help="0 picks a free one")
    group.add_argument(
        "--num-tokenizer",
        metavar="N",
        type=int,
        default=0,
        help="extra tokenizer processes; 0: one process for both directions",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        default=None,
        help="name in /v1/models; none: from the path",
    )
    group.add_argument(
        "--api-key", metavar="KEY", default=None, help="refuse requests without this bearer token"
    )
    group.add_argument(
        "--shell", action="store_true", help="chat in this terminal instead of serving"
    )


def config_from(args: argparse.Namespace) -> ServerConfig:
    """Flags to config. Raises `ValueError` that names the field."""
    return ServerConfig(
        model_path=args.model_path,
        dtype=args.dtype,
        device=args.device,
        tp=TPInfo(rank=0, size=args.tensor_parallel_size),
        use_dummy_weight=args.dummy_weight,
        max_seq_len_override=args.max_seq_len_override,
        attention_backend=args.attention_backend,
        cache_type=args.cache_type,
        page_size=args.page_size,
        num_page_override=args.num_pages,
        memory_ratio=args.memory_ratio,
        max_running_req=args.max_running_requests,
        max_extend_tokens=args.max_prefill_length,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
        overlap=not args.disable_overlap,
        host=args.host,
        port=args.port,
        num_tokenizer=args.num_tokenizer,
        served_model_name=args.served_model_name,
        api_key=args.api_key,
    )


def sampling_defaults(path: Path) -> dict[str, Any]:
    """What the model's `generation_config.json` advises; without it, a temperature of 1."""
    file = path / "generation_config.json"
    advice = json.loads(file.read_text()) if file.is_file() else {}
    if advice.get("do_sample") is False:
        return {"temperature": 0.0}
    known = {
        name: advice[name]
        for name in ("temperature", "top_p", "top_k")
        if advice.get(name) is not None
    }
    if known.get("top_k") == 0:  # the hub's spelling of "off"
        del known["top_k"]
    try:
        SamplingParams(**known)
    except ValueError as error:  # the model's fault: say so now, not to each client
        raise ValueError(f"generation_config.json: {error}") from None
    return {"temperature": 1.0, **known}


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `ValueError` that names the port when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(
            f"port: cannot listen on {host}:{port} ({error.strerror}); try --port 0"
        ) from error
    return sock


def settings_for(config: ServerConfig, path: Path) -> ApiSettings:
    """What the routes say of the model."""
    name = config.served_model_name or (path.name if config.model_path else "minisgl-tiny")
    return ApiSettings(
        model_name=name,
        max_model_len=max_seq_len(config, ModelConfig.from_path(path)),
        sampling_defaults=sampling_defaults(path),
        api_key=config.api_key,
    )


async def watch(group: WorkerGroup, frontend: Frontend) -> None:
    """End all streams when a worker dies: a client gets an error, never silence."""
    while (name := group.dead()) is None:
        await asyncio.sleep(0.2)
    frontend.fail_all(f"the {name} died; restart the server")
    print(f"minisgl: the {name} died; answering 503 until restarted", file=sys.stderr, flush=True)


class PatientServer(uvicorn.Server):
    """Asked to stop for the second time, uvicorn tears all streams; we end them with a reason."""

    hurry = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.hurry = True
        else:
            super().handle_exit(sig, frame)


async def let_go(server: PatientServer, frontend: Frontend, patience: float = 1.0) -> None:
    """End the streams of a server that was asked to stop; at once if it was asked twice."""
    while not server.should_exit:
        await asyncio.sleep(0.05)
    end = time.monotonic() + patience
    while time.monotonic() < end and not server.hurry:
        await asyncio.sleep(0.05)
    frontend.fail_all("the server is shutting down")


async def serve_http(
    group: WorkerGroup, frontend: Frontend, settings: ApiSettings, sock: socket.socket
) -> None:
    """Run uvicorn on `sock` until a signal asks it to stop."""
    app = create_app(frontend, settings)
    options = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    server = PatientServer(options)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, server.handle_exit, signal.SIGHUP, None)
    watchers = [
        asyncio.ensure_future(watch(group, frontend)),
        asyncio.ensure_future(let_go(server, frontend)),
    ]
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if server.started:
        print(f"minisgl serves {settings.model_name} on http://{shown}:{port}/v1", flush=True)
    try:
        await serving
    finally:
        for watcher in watchers:
            watcher.cancel()


def run(config: ServerConfig, shell: bool) -> None:
    """Start all parts, serve or chat, and leave nothing behind."""
    path = resolve_model_path(config.model_path)
    settings = settings_for(config, path)
    sock = None if shell else listen(config.host, config.port)
    with WorkerGroup(config) as group:
        frontend_inbox = ZmqInbox(group.addresses.frontend)
        group.wait_ready()
        outboxes = [ZmqOutbox(address) for address in group.addresses.tokenizers]
        frontend = Frontend(outboxes, frontend_inbox)
        try:
            if sock is None:
                asyncio.run(run_shell(frontend, settings.sampling_defaults))
            else:
                asyncio.run(serve_http(group, frontend, settings, sock))
        finally:
            frontend.close()
            for outbox in outboxes:
                outbox.close()
            frontend_inbox.close()


@contextmanager
def terminable() -> Iterator[None]:
    """Turn SIGTERM (`kill`, a container's stop) and SIGHUP (a closed terminal) into `SystemExit`.

    So `with` blocks end. The status is the one that shells give.
    """

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m minisgl`; returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        with terminable():
            run(config_from(args), args.shell)
    except (ValueError, OSError, StartFailed) as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
