"""Pictures of load runs: times over throughput, or one run's distribution.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = (("ttft", "time to first token, ms"), ("tpot", "time per later token, ms"))


def need_matplotlib(path: Path) -> None:
    """`ImportError` or `ValueError` now, instead of after a long run."""
    try:
        import matplotlib.figure  # noqa: F401  # an optional dependency
    except ImportError as error:
        raise ImportError("plot: needs matplotlib, pip install matplotlib") from error
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"plot: must end in .svg, .png or .pdf, got {str(path)!r}")


def draw(axes: Sequence[Any], runs: Sequence[dict[str, Any]], colors: Sequence[str]) -> None:
    """Percentiles of both times over the offered load, or else over requests per second."""
    done = [run for run in runs if run["completed"]]
    done = [run for run in done if run["load"]["rate"]] or done
    offered = [run["load"]["rate"] or run["requests_per_s"] for run in done]
    for ax, (name, label) in zip(axes, PARTS, strict=True):
        for column, color in zip(("p50", "p90", "p99"), colors, strict=True):
            values = [(run["ms"][name] or {}).get(column) for run in done]
            ax.plot(offered, values, "o-", color=color, label=column)
        ax.set(xlabel="requests per second", ylabel=label)
        ax.set_ylim(bottom=0)
    axes[0].legend(frameon=False)


def save_plot(path: Path, runs: Sequence[dict[str, Any]], title: str) -> None:
    """Both pictures into one file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    draw(figure.subplots(1, 2), runs, ("#56B4E9", "#E69F00", "#009E73"))
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
