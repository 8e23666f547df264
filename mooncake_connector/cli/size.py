"""`mooncake-connector size`: how much memory a model's KV takes, and how many tokens a pool holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli.columns import pairs
from mooncake_connector.cli.output import Json, print_json, print_table, typed_path, width
from mooncake_connector.cli.pool import opened
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import PoolError
from mooncake_connector.kv.identity.shape import ITEMSIZES, read_shape
from mooncake_connector.sizes import human_nbytes, parse_nbytes
from store_client.embedded.folder import choose_default, default_capacity_nbytes

_GIB = 1 << 30


def _typed_nbytes(text: str) -> int:
    try:
        nbytes = parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None
    if not nbytes:
        raise typer.BadParameter(f"{text!r}: expected more than nothing")
    return nbytes


def size(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", parser=typed_path, help="The model's folder, or its config.json.")
    ],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallel ranks: says also what each stores.")] = 1,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", metavar="|".join(ITEMSIZES), help="Of the KV cache; else the model's.")
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(metavar="SIZE", parser=_typed_nbytes, help="Of the pool, as 64GiB; else the one here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """How much memory a model's KV takes: for a token, for a page, and how many tokens a pool holds.

    \b
    Examples:
      mooncake-connector size /models/Llama-3.1-8B-Instruct
      mooncake-connector size /models/Qwen3-32B --tp 4 --kv-dtype fp8 --capacity 256GiB
    """
    if kv_dtype is not None and kv_dtype not in ITEMSIZES:
        raise typer.BadParameter(f"{kv_dtype!r} is none of {', '.join(ITEMSIZES)}", param_hint="--kv-dtype")
    config = load_config()
    shape, page_tokens = read_shape(model), int(config.page_tokens)
    page = shape.page_format(page_tokens, kv_dtype)
    if capacity is not None and capacity < page.nbytes:
        said = f"{human_nbytes(capacity)} is less than a page, {human_nbytes(page.nbytes)}: give it a unit, as in 64GiB"
        raise typer.BadParameter(said, param_hint="--capacity")
    pool_nbytes, place = (capacity, "") if capacity is not None else _pool(config)
    rank_nbytes = page.nbytes // shape.num_kv_heads * -(-shape.num_kv_heads // tp)
    figures = {
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "kv_dtype": kv_dtype or shape.dtype,
        "page_tokens": page_tokens,
        "token_nbytes": page.nbytes // page_tokens,
        "page_nbytes": page.nbytes,
        "rank_page_nbytes": rank_nbytes,
        "tokens_in_a_gib": _GIB // page.nbytes * page_tokens,
        "pool_nbytes": pool_nbytes,
        "pool_tokens": pool_nbytes // page.nbytes * page_tokens,
    }
    if as_json:
        print_json(figures)
        return
    kind = "MLA" if not shape.v_dim else f"{shape.num_kv_heads} KV heads of {shape.k_dim}"
    rows = [
        ("model", f"{shape.num_layers} layers, {kind}, {figures['kv_dtype']}"),
        ("a token", human_nbytes(page.nbytes // page_tokens)),
        (f"a page of {page_tokens} tokens", human_nbytes(page.nbytes)),
        ("1 GiB holds", f"{figures['tokens_in_a_gib']:,} tokens"),
        ("the pool holds", f"{figures['pool_tokens']:,} tokens in {human_nbytes(pool_nbytes)}{place}"),
    ]
    if tp > 1:
        rows.insert(3, (f"of that, each of {tp} ranks", human_nbytes(rank_nbytes)))
    print_table(pairs(f"KV cache of {model}", rows, width()))


def _pool(config: Config) -> tuple[int, str]:
    """The capacity of the pool here, or of the one that an engine would make, and where that is."""
    if config.capacity is not None:
        return config.capacity, ", the configured capacity"
    try:
        with opened(None) as store:
            stats = store.stats()
            return stats.capacity_nbytes, f", {stats.location}"
    except PoolError:
        folder = config.pool or choose_default(None)[0]
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        return default_capacity_nbytes(there), f", as an engine would make it in {folder}"
