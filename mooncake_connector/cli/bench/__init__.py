"""Benchmarks behind `mooncake-connector bench`. `app` is the command group; each module holds one part of a run."""

from mooncake_connector.cli.bench.commands import app

__all__ = ["app"]
