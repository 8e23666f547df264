"""A report of `bench serve` as a picture: requests per second, and the time to the first token."""

from __future__ import annotations

import io
from typing import Any

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.engines import OURS
from mooncake_connector.cli.bench.serve.report import NEW, SEEN, ServeReport, ServeRow

_COLORS = {NEW: "#b9c6d6", SEEN: "#5b7fa6"}
_OUR_COLORS = {NEW: "#f3c9a0", SEEN: "#d9701e"}


def check() -> None:
    """Before anything is measured: raise BenchError where no picture could be made."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib ({error}): install it with `pip install matplotlib`") from error


def draw(report: ServeReport) -> bytes:
    """The picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.ttft_p50_s is not None]
    servers = list(dict.fromkeys(row.server for row in rows))
    figure = Figure(figsize=(10, 1.9 + 0.62 * len(servers)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    rate, latency = figure.subplots(1, 2, sharey=True)
    for row in rows:
        _bars(rate, latency, row, servers.index(row.server))
    for axes, text, longest in (
        (rate, "requests per second (more is better)", max((row.requests_per_second for row in rows), default=1)),
        (
            latency,
            "seconds to the first token, p50 and p99 (less is better)",
            max((row.ttft_p99_s or 0 for row in rows), default=1),
        ),
    ):
        axes.set_xlabel(text, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, (longest or 1) * 1.3)  # room for the figures at the ends of the bars
    rate.set_yticks(range(len(servers)), servers)
    rate.invert_yaxis()
    for label in rate.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == OURS else "normal")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(_title(report), fontsize=10.5)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _bars(rate: Any, latency: Any, row: ServeRow, place: int) -> None:
    colors = _OUR_COLORS if row.server == OURS else _COLORS
    middle = place + (-0.2 if row.prompts == NEW else 0.2)
    rate.barh(middle, row.requests_per_second, height=0.38, color=colors[row.prompts])
    _write(rate, row.requests_per_second, middle, f"{row.requests_per_second:.1f}")
    p50, p99 = row.ttft_p50_s or 0.0, row.ttft_p99_s or 0.0
    latency.barh(middle, p50, height=0.38, color=colors[row.prompts])
    latency.plot([p50, p99], [middle, middle], color="#444444", linewidth=1, marker="|", markersize=6)
    _write(latency, p99, middle, f"{_short(p50)}, p99 {_short(p99)}")


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.3f}"


def _write(axes: Any, value: float, place: float, text: str) -> None:
    axes.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    texts = {NEW: "new prompts (every cache starts without them)", SEEN: "the same prompts again"}
    return [Patch(color=_COLORS[prompts], label=text) for prompts, text in texts.items()]


def _title(report: ServeReport) -> str:
    found = report.settings
    asked = (
        f"{found['requests']} requests over {found['prefixes']} prefixes of {found['prefix_tokens']:,} tokens, "
        f"{found['concurrency']} at a time"
    )
    where = report.machine.get("accelerator") or f"{report.machine['cpu']}, {report.machine['cores']} cores"
    cache = f"a cache in the engine for {found['engine_cache_share']:.0%} of them"
    return f"{asked}, {cache}\nvLLM {report.versions['vllm']}, {found['model']}, {where}"
