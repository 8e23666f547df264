"""Pools for tests of what lies behind them."""

from store.conftest import pool, store

__all__ = ["pool", "store"]
