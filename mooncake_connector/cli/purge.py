"""`mooncake-connector store purge`: delete pages of the tiers by hand, whether or not an agent runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.output import EXIT_FAILED, Json, PoolFolder, human_seconds, print_error, print_json
from mooncake_connector.cli.store import Which, Yes, confirm
from mooncake_connector.config.secret import read_secret
from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.config.tiers import AnyTier
from mooncake_connector.errors import ConfigError
from mooncake_connector.sizes import human_nbytes, parse_nbytes
from store_client.tiers.base import Purged, TierError
from store_client.tiers.open import open_tier

_DEADLINE_S = 3600.0
_AGE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DIGEST_DIGITS = 64


def _age_s(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no age: expected a number and s, m, h or d, such as 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no size: {error}") from None


def purge(
    tier: Annotated[
        list[str] | None,
        typer.Option("--tier", "-t", metavar="NAME", help="Only this tier; may be given again.", show_default=False),
    ] = None,
    namespace: Which = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="AGE", parser=_age_s, help="Only pages older than this: 90m, 7d.", show_default=False),
    ] = None,
    larger_than: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=_nbytes, help="Only pages of more bytes than this: 8MiB.", show_default=False
        ),
    ] = None,
    pool: PoolFolder = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete pages of the configured tiers, those that all conditions given apply to. The pool keeps its pages.

    Any number of hosts may do it at once. A disk tier is its agent's alone, which has to be ended first. Tiers that
    keep no age or size of pages (mooncake, disk) are purged by namespace.

    \b
    Examples:
      mooncake-connector store purge --older-than 7d
      mooncake-connector store purge --tier object --namespace 3f9a1c --larger-than 8MiB --yes
    """
    config = load_config()
    tiers = _chosen(tuple(config.tiers or ()), tier or [])
    digest = _digest(namespace, pool)
    conditions = [
        f"namespace {digest.hex()[:12]}" if digest is not None else "",
        f"older than {human_seconds(older_than)}" if older_than is not None else "",
        f"larger than {human_nbytes(larger_than)}" if larger_than is not None else "",
    ]
    which = ", ".join(filter(None, conditions)) or "all of them"
    confirm(f"Delete pages ({which}) of {', '.join(one.title for one in tiers)}, for all hosts that share them?", yes)
    secret = b"" if config.secret_file is None else read_secret(config.secret_file)
    outcomes: dict[str, Purged | TierError] = {}
    for one in tiers:
        try:
            opened = open_tier(one, secret)
            try:
                outcomes[one.title] = opened.purge(
                    digest, older_than_s=older_than, larger_than_nbytes=larger_than, deadline_s=_DEADLINE_S
                )
            finally:
                opened.close()
        except TierError as error:
            outcomes[one.title] = error
    _show(outcomes, as_json)
    if any(isinstance(outcome, TierError) for outcome in outcomes.values()):
        raise typer.Exit(EXIT_FAILED)


def _show(outcomes: dict[str, Purged | TierError], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                title: {"error": str(found)} if isinstance(found, TierError)
                else {"purged_pages": found.pages, "purged_nbytes": found.nbytes}
                for title, found in outcomes.items()
            }
        )  # fmt: skip
        return
    for title, found in outcomes.items():
        if isinstance(found, TierError):
            print_error(str(found))
        else:
            size = f" ({human_nbytes(found.nbytes)})" if found.nbytes else ""
            typer.echo(f"tier {title}: removed {found.pages:,} pages{size}")


def _chosen(tiers: tuple[AnyTier, ...], names: list[str]) -> list[AnyTier]:
    if not tiers:
        raise ConfigError(f"no tiers are configured, so there is nothing to purge: set {environ_name('tiers')}")
    titles = [one.title for one in tiers]
    for name in names:
        if name not in titles:
            raise ConfigError(f"--tier {name!r} is no configured tier; there are {', '.join(titles)}")
    return [one for one in tiers if not names or one.title in names]


def _digest(namespace: str | None, pool: Path | None) -> bytes | None:
    """Of a whole id, which the pool need not know, or of the beginning of one that it knows."""
    if namespace is not None and re.fullmatch(rf"[0-9a-fA-F]{{{_DIGEST_DIGITS}}}", namespace):
        return bytes.fromhex(namespace)
    if namespace is None:
        return None
    with pool_.opened(pool) as store:
        return pool_.find_namespace(store, namespace)
