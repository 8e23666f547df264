"""`mooncake-connector simulate`: hit rates that other sizes and policies would have had on recorded traffic."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli.columns import folded, sheet
from mooncake_connector.cli.output import Json, print_json, print_table, typed_path, width
from mooncake_connector.cli.sweep_plot import draw, need_matplotlib
from mooncake_connector.config.values import MIN_CAPACITY_NBYTES
from mooncake_connector.kv.identity.shape import ITEMSIZES, read_shape
from mooncake_connector.sizes import human_nbytes, parse_nbytes
from store_client.embedded.policies import POLICIES
from store_client.simulation.sweep import Outcome, advice, all_pages_nbytes, sweep
from store_client.simulation.traces import read_trace

_MOST_SIZES = 32
_MOST_NBYTES = 8 << 40


def _typed_sizes(text: str) -> list[int | Fraction]:
    """ "8GiB..512GiB" by doubling, or "8GiB,24GiB", or "5%,10%" of all different pages of the trace."""
    sizes: list[int | Fraction] = []
    try:
        if ".." in text:
            low, high = map(parse_nbytes, text.split("..", 1))
            sizes += [low << i for i in range(_MOST_SIZES + 1) if low << i <= high] if low else []
        else:
            sizes += dict.fromkeys(map(_typed_size, text.split(",")))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--capacity") from None
    if not sizes or not all(sizes) or len(sizes) > _MOST_SIZES or max(sizes) > _MOST_NBYTES:
        wanted = f"expected a range such as 8GiB..512GiB, or up to {_MOST_SIZES} sizes, or shares such as 5%,10%"
        wanted += f"; a pool has at most {human_nbytes(_MOST_NBYTES)}"
        raise typer.BadParameter(f"{text!r}: {wanted}", param_hint="--capacity")
    if small := [size for size in sizes if isinstance(size, int) and size < MIN_CAPACITY_NBYTES]:
        said = f"{human_nbytes(small[0])} is less than a pool may have, {human_nbytes(MIN_CAPACITY_NBYTES)}"
        raise typer.BadParameter(f"{text!r}: {said}: give it a unit, as in 64GiB", param_hint="--capacity")
    return sizes


def _typed_size(text: str) -> int | Fraction:
    share = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%\s*", text)
    return parse_nbytes(text) if share is None else Fraction(share[1]) / 100


def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", parser=typed_path, help="A recording of `record`, or a Mooncake trace.")
    ],
    model: Annotated[
        Path, typer.Option("--model", metavar="DIR", parser=typed_path, help="The model's folder, or its config.json.")
    ],
    capacity: Annotated[
        str,
        typer.Option(metavar="SIZES", help="A range, by doubling; 8GiB,24GiB; or shares of the trace's pages: 5%,10%."),
    ] = "8GiB..512GiB",
    policy: Annotated[str, typer.Option(metavar="|".join((*POLICIES, "all")), help="Eviction policy.")] = "all",
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", metavar="|".join(ITEMSIZES), help="Of the KV cache; else the model's.")
    ] = None,
    prefill: Annotated[
        float, typer.Option("--prefill", metavar="TOKENS/S", min=1, help="Speed of the engine, for the seconds saved.")
    ] = 10_000.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", parser=typed_path, help="Draw the hit rates to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The hit rates that pools of other sizes and eviction policies would have had on recorded traffic.

    Runs the store's own policies on the trace, without pages. A hit is a leading page that was in the pool.

    \b
    Examples:
      mooncake-connector simulate trace.jsonl --model /models/Llama-3.1-8B-Instruct
      mooncake-connector simulate trace.jsonl --model DIR --capacity 8GiB..512GiB --policy all --plot sizes.png
    """
    if policy not in (*POLICIES, "all"):
        raise typer.BadParameter(f"{policy!r} is none of {', '.join(POLICIES)}, all", param_hint="--policy")
    if kv_dtype is not None and kv_dtype not in ITEMSIZES:
        raise typer.BadParameter(f"{kv_dtype!r} is none of {', '.join(ITEMSIZES)}", param_hint="--kv-dtype")
    if plot is not None:
        need_matplotlib()
        if not plot.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {plot.parent}", param_hint="--plot")
        if plot.is_dir() or not os.access(plot if plot.exists() else plot.parent, os.W_OK):
            raise typer.BadParameter(f"{plot} cannot be written", param_hint="--plot")
    wanted = _typed_sizes(capacity)
    token_nbytes = read_shape(model).page_format(1, kv_dtype).nbytes
    seen = read_trace(trace)
    whole = all_pages_nbytes(seen, token_nbytes)
    sizes = sorted({size if isinstance(size, int) else min(max(1, int(size * whole)), _MOST_NBYTES) for size in wanted})
    policies = list(POLICIES) if policy == "all" else [policy]
    outcomes = sweep(seen, policies, sizes, token_nbytes, os.cpu_count() or 1, _progress)
    if plot is not None:
        draw(plot, outcomes, trace.name)
    if as_json:
        print_json([_plain(outcome, prefill) for outcome in outcomes])
        return
    rows = [[human_nbytes(size), *_cells(outcomes, size, policies, prefill)] for size in sizes]
    headings = ["capacity>", *(f"{name}>" for name in policies), "prefill saved>"]
    title = f"{trace.name}: {len(seen.requests):,} requests, {outcomes[0].tokens:,} prompt tokens"
    print_table(sheet(title, headings, rows, width()))
    typer.echo()
    what = f"Shares of prompt tokens that hit, and what the best policy saves at {prefill:,.0f} tokens/s (--prefill)."
    for line in (what, sentence(outcomes, policies)):
        typer.echo("\n".join(folded(line, width() or 10_000)))


def _cells(outcomes: Sequence[Outcome], size: int, policies: Sequence[str], prefill: float) -> list[str]:
    rates = {each.policy: each for each in outcomes if each.capacity_nbytes == size}
    saved_s = max(each.hit_tokens for each in rates.values()) / prefill
    return [*(f"{rates[name].hit_rate:.1%}" for name in policies), f"{saved_s:,.0f} s"]


def sentence(outcomes: Sequence[Outcome], policies: Sequence[str]) -> str:
    """What size to choose, in words: "48 GiB gives 71 %, doubling it 74 %"."""
    best = max(policies, key=lambda name: sum(each.hit_rate for each in outcomes if each.policy == name))
    mine = [each for each in outcomes if each.policy == best]
    if not any(each.hit_tokens for each in outcomes):
        return "Nothing hits at any of these sizes: no prompt begins with a full page of one that was still there."
    pair = advice(mine)
    if pair is None:
        return f"{human_nbytes(mine[-1].capacity_nbytes)} gives {mine[-1].hit_rate:.0%} ({best})."
    chosen, doubled = pair
    size = human_nbytes(chosen.capacity_nbytes)
    return f"{size} gives {chosen.hit_rate:.0%}, doubling it {doubled.hit_rate:.0%} ({best})."


def _plain(outcome: Outcome, prefill: float) -> dict[str, object]:
    return {
        "policy": outcome.policy,
        "capacity_nbytes": outcome.capacity_nbytes,
        "hit_rate": round(outcome.hit_rate, 5),
        "hit_tokens": outcome.hit_tokens,
        "tokens": outcome.tokens,
        "evicted_pages": outcome.evicted_pages,
        "prefill_saved_s": round(outcome.hit_tokens / prefill, 1),
    }


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{done} of {of}" + ("\n" if done == of else ""), err=True, nl=False)
