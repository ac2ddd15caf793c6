"""Small tools of the notebooks: grow a class over several cells, one palette, pictures.

Generated from notebooks/B_workshop.ipynb: edit there.
"""

from __future__ import annotations

import abc
import io
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Member = TypeVar("Member")


def member_name(member: Any) -> str:
    """Name of a function, a property or a cached property."""
    for inner in (member, getattr(member, "fget", None), getattr(member, "func", None)):
        name = getattr(inner, "__name__", None)
        if name is not None:
            return str(name)
    raise TypeError(f"add_to: {member!r} has no name; decorate a function or a property")


def add_to(cls: type) -> Callable[[Member], Member]:
    """Decorate a function or property to make it a member of `cls`; for use in notebooks only.

    The exporter writes the member inside the class, so the package never calls this.
    """

    def put(member: Member) -> Member:
        name = member_name(member)
        setattr(cls, name, member)
        if hasattr(member, "__set_name__"):
            member.__set_name__(cls, name)
        abc.update_abstractmethods(cls)
        before: Member = getattr(member, "__globals__", {}).get(name, member)
        return before

    return put


palette: dict[str, str] = {
    "free": "#E8E8E8",
    "cached": "#56B4E9",
    "locked": "#0072B2",
    "owned": "#E69F00",
    "new": "#009E73",
    "dummy": "#CC79A7",
    "prefill": "#F0E442",
    "decode": "#A6761D",
    "idle": "#FFFFFF",
    "measured": "#222222",
    "reference": "#8A8A8A",
    "limit": "#D55E00",
    "rank_0": "#C3B1E1",
    "rank_1": "#C9C96B",
    "rank_2": "#F2B8B5",
    "rank_3": "#A5DED8",
    "text": "#222222",
    "edge": "#666666",
}
meanings: dict[str, str] = {
    "free": "free",
    "cached": "in the prefix cache",
    "locked": "in the prefix cache, locked",
    "owned": "owned by one request",
    "new": "computed in this step",
    "dummy": "padding",
    "prefill": "prefill",
    "decode": "decode",
    "idle": "idle",
    "measured": "this engine, measured",
    "reference": "for comparison",
    "limit": "limit or error",
    "rank_0": "rank 0",
    "rank_1": "rank 1",
    "rank_2": "rank 2",
    "rank_3": "rank 3",
}


def legend(where: Any, kinds: Iterable[str] = (), *, below: bool = True, **own: str) -> None:
    """Name the colours of a figure: kinds of `palette`, each with its meaning or your own words.

    `own` maps a kind to other words for it. Of axes, `below` puts the legend right under the frame;
    of a figure, it stands under everything else, and nothing overlaps.
    """
    from matplotlib.figure import Figure  # importing this module needs no plotting library
    from matplotlib.patches import Patch

    words = {kind: meanings[kind] for kind in kinds} | own
    patches = [
        Patch(facecolor=palette[kind], edgecolor=palette["edge"], label=word)
        for kind, word in words.items()
    ]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.08)} if below else {"loc": "best"}
    if isinstance(where, Figure):
        where.set_layout_engine("constrained")
        place = {"loc": "outside lower center"}
    where.legend(handles=patches, ncols=min(4, len(patches)), frameon=False, fontsize=8, **place)


def show(figure: Any, alt: str) -> None:
    """Show a matplotlib figure with a sentence for those who cannot see it, and close it."""
    from IPython.display import display
    from matplotlib import pyplot

    data = io.BytesIO()
    card = {"facecolor": "white", "bbox_inches": "tight", "metadata": {"Description": alt}}
    figure.savefig(data, format="png", dpi=200, **card)  # shown at half that, sharp on any screen
    pyplot.close(figure)
    png = data.getvalue()
    about = {"alt": alt, "width": int.from_bytes(png[16:20]) // 2}
    display({"image/png": png, "text/plain": alt}, raw=True, metadata={"image/png": about})


def draw_slots(
    ax: Any, rows: Sequence[tuple[str, Sequence[str], Sequence[object]]], page_size: int = 0
) -> None:
    """Draw rows of slots into matplotlib axes.

    A row is its label, the kinds of its slots (keys of `palette`) and the texts in them. A thicker
    line closes each page if `page_size` is given.
    """
    for y, (_, kinds, texts) in enumerate(rows):
        for x, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
            ax.barh(y, 1, left=x, height=0.8, color=palette[kind], edgecolor=palette["edge"])
            ax.text(x + 0.5, y, str(text), ha="center", va="center", color=palette["text"])
        for x in range(0, len(kinds) + 1, page_size) if page_size else ():
            ax.plot([x, x], [y - 0.4, y + 0.4], color=palette["text"], linewidth=2)
    ax.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    ax.set_xticks([])
    ax.invert_yaxis()
    ax.set_frame_on(False)
    ax.tick_params(length=0)


def best_ms(call: Callable[..., object], *args: object, repeats: int = 5) -> float:
    """Return the shortest of several runs of `call(*args)`, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(*args)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def error_message(
    call: Callable[..., object],
    *args: object,
    error: type[Exception] = ValueError,
    **kwargs: object,
) -> str:
    """Return the message of the error a call raises; AssertionError if it raises none."""
    try:
        call(*args, **kwargs)
    except error as raised:
        return f"{type(raised).__name__}: {raised}"
    raise AssertionError(f"{call} raised no {error.__name__}")
