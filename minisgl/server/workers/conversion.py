"""Conversions of the text worker: tokens of a prompt, text of tokens.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.server.workers.messages import Converted, ConvertMsg
from minisgl.tokenizer import Tokenizer


def convert(tokenizer: Tokenizer, msg: ConvertMsg, window: int) -> Converted:
    """Return the tokens of a prompt, at most `window`, or the text of `input_ids`."""
    backend = tokenizer.backend
    if msg.input_ids is not None:
        if any(backend.id_to_token(token) is None for token in msg.input_ids):
            raise ValueError(f"must be ids of tokens, got {max(msg.input_ids)} and others")
        text = tokenizer.decode(msg.input_ids, skip_special=False)
        return Converted(uid=msg.uid, text=text, token_ids=msg.input_ids)
    text = msg.text or ""
    if msg.messages is not None:
        text = tokenizer.render_chat(msg.messages, **msg.template_kwargs)
    special = msg.add_special_tokens and msg.messages is None
    ids = tokenizer.encode(text, special, window).tolist()
    return Converted(uid=msg.uid, text=text, token_ids=ids, pieces=[*map(backend.id_to_token, ids)])
