"""A picture of hit rates by capacity. matplotlib is an extra: without it there are figures, and no picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.sizes import human_nbytes
from store_client.simulation.sweep import Outcome


def need_matplotlib() -> None:
    """Raises MooncakeConnectorError where there is none: before anything is computed."""
    if find_spec("matplotlib") is None:
        raise MooncakeConnectorError(
            "--plot needs matplotlib: install it with `pip install 'mooncake-connector[plot]'`, or leave --plot out"
        )


def draw(path: Path, outcomes: Sequence[Outcome], title: str) -> None:
    """Write a PNG: a line for each policy. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.policy == policy]
        axes.plot(
            [each.capacity_nbytes for each in mine], [100 * each.hit_rate for each in mine], marker="o", label=policy
        )
    sizes = sorted({outcome.capacity_nbytes for outcome in outcomes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [human_nbytes(size) for size in sizes], rotation=30)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="capacity of the pool", ylabel="hit tokens, % of all")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
