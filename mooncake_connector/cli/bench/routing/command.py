"""`mooncake-connector bench routing`: options, and the outcomes as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.report import LEGEND_COLUMNS, number, say
from mooncake_connector.cli.columns import folded, sheet
from mooncake_connector.cli.output import EXIT_FAILED, Json, print_error, print_table, typed_path, width

_HEADINGS = ("trace~", "policy", "hit rate>", "TTFT p50, s>", "TTFT p99, s>", "busiest>")
_LEGEND = (
    "Simulated, but for the policies and the history, which are the router's own. hit rate: prompt tokens that were "
    "not computed. busiest: tokens computed by the instance that computed the most, over the mean. Prompts are "
    "computed one after the other, at a rate that a full batch of decoding halves; instances share nothing."
)


def routing(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", parser=typed_path, help="In Mooncake's format, a JSON object a line."),
    ],
    instances: Annotated[int, typer.Option(min=1, max=1000, help="Instances behind the router.")] = 10,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=1.0, help="Prompt tokens that an instance computes in a second.")
    ] = 8000.0,
    cache_tokens: Annotated[
        int, typer.Option(min=1024, help="KV that an instance has room for, running requests included.")
    ] = 2_000_000,
    as_json: Json = False,
) -> None:
    """What the router's policies make of a trace, in simulated instances: hits, time to first token, balance.

    \b
    Example:
      mooncake-connector bench routing conversation_trace.jsonl --cache-tokens 500000
    """
    # Not at the top: other commands should start without this.
    from mooncake_connector.cli.bench.routing.engine import Shape
    from mooncake_connector.cli.bench.routing.run import Outcome, policies, simulate
    from mooncake_connector.cli.bench.routing.trace import read_trace

    shape = Shape(prefill_tokens_per_s, cache_tokens)
    found: dict[str, dict[str, Outcome]] = {}
    try:
        for path in traces:
            trace = read_trace(path)
            for name, policy, source in policies():
                say(f"{path.name}: {name}, {len(trace)} requests")
                found.setdefault(path.name, {})[name] = simulate(trace, shape, instances, policy, source)
    except BenchError as error:
        print_error(str(error))
        raise typer.Exit(EXIT_FAILED) from None
    if as_json:
        typer.echo(msgspec.json.encode({"instances": instances, "shape": shape, "outcomes": found}).decode())
        return
    rows = [
        (trace, name, f"{of.hit_rate:.1%}", number(of.ttft_p50_s), number(of.ttft_p99_s), f"{of.busiest:.2f}")
        for trace, outcomes in found.items()
        for name, of in outcomes.items()
    ]
    columns = width()
    print_table(sheet("mooncake-connector bench routing", _HEADINGS, rows, columns))
    typer.echo()
    for line in folded(_LEGEND, columns or LEGEND_COLUMNS):
        typer.echo(line)
