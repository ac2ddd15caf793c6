"""Conversions of the text worker: tokens of a prompt, text of tokens.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.server.workers.messages import Converted, ConvertMsg
from minisgl.tokenizer import Tokenizer


def convert(tokenizer: Tokenizer, msg: ConvertMsg, window: int) -> Converted:
    """Return the tokens of a prompt, or the text of `input_ids`, of at most `window` tokens."""
    name_of, ids = tokenizer.backend.id_to_token, msg.input_ids
    if ids is not None:
        if len(ids) > window or any(name_of(token) is None for token in ids):
            raise ValueError(f"must be at most {window} valid ids, got {len(ids)} up to {max(ids)}")
        return Converted(uid=msg.uid, text=tokenizer.decode(ids, skip_special=False), token_ids=[])
    text = msg.text or ""
    if msg.messages is not None:
        text = tokenizer.render_chat(msg.messages, **msg.template_kwargs)
    special = msg.add_special_tokens and msg.messages is None
    ids = tokenizer.encode(text, special, window).tolist()
    return Converted(uid=msg.uid, text="", token_ids=ids, pieces=[*map(name_of, ids * msg.pieces)])
