"""Settings of the routes, from the config and the model.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl.config.engine import ServerConfig, max_seq_len
from minisgl.config.model import ModelConfig, sampling_advice
from minisgl.core import SamplingParams
from minisgl.server.http.calls import ChatAbilities, chat_abilities, read_template


@dataclass(frozen=True)
class ApiSettings:
    """Settings of the routes beside the frontend."""

    model_name: str
    max_model_len: int
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    request_timeout: float | None = None  # seconds for one answer; a request may ask for less
    can: ChatAbilities = field(default_factory=ChatAbilities)  # abilities by its chat template
    named_keys: Mapping[str, str] = field(default_factory=dict)  # more API keys, by name
    origins: Sequence[str] = ("*",)  # allowed origins besides this machine
    isolate_prefixes: bool = False  # cached prefixes are shared only within one client
    info: Mapping[str, Any] = field(default_factory=dict)  # for `/server_info`

    @cached_property
    def keys(self) -> dict[str, str]:
        """All API keys by name; the single one has an empty name."""
        single = {} if self.api_key is None else {"": self.api_key}
        return {**single, **self.named_keys}


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Return the model's advice on sampling; without a temperature in it, 1."""
    known = sampling_advice(path)
    try:
        SamplingParams(**known)
    except ValueError as error:  # the model's fault: report it at the start, not to each client
        raise ValueError(f"generation_config.json: {error}") from None
    return {"temperature": 1.0, **known}


def served_name(model: str | None) -> str:
    """Return the hub's id of a model, given or from the hub's cache, or its folder's name."""
    if model is None:
        return "minisgl-tiny"
    folder = Path(os.path.abspath(os.path.expanduser(model)))  # follows no link
    if not folder.is_dir():
        return model
    if folder.parent.name == "snapshots" and (cached := folder.parents[1].name) != "snapshots":
        return cached.removeprefix("models--").replace("--", "/")
    return folder.name


def settings_for(
    config: ServerConfig, path: Path, request_timeout: float | None = None
) -> ApiSettings:
    """Make the routes' settings for the model in the folder `path`."""
    name = config.served_model_name or served_name(config.model_path)
    model, can = ModelConfig.from_path(path), chat_abilities(read_template(path))
    window = max_seq_len(config, model)
    if config.num_pages is not None:  # a KV cache smaller than the window
        window = min(window, config.num_pages * config.page_size)
    info = {name: getattr(config, name) for name in ("page_size", "max_running_req")}
    defaults = sampling_defaults(path)
    return ApiSettings(name, window, defaults, config.api_key, request_timeout, can, info=info)
