"""The test's own look into a pool that servers use: which pages of a prompt are there, and what if they were wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys, root_digest
from store_client import EmbeddedStore
from store_client.testing import get_pages, put_pages

PAGE_TOKENS = 64
ASKED_AGAIN_S = 10.0

__all__ = ["PAGE_TOKENS", "Pages", "clear", "wait_for"]


class Writer(Protocol):
    """A server that saves what it computes."""

    def compute(self, prompt: Sequence[int], **tenant: str | None) -> None:
        """With nothing of the prompt in the server's own cache."""


class Pages:
    """Pages of one model in the pool at `path`; every call opens the pool anew, as any other process would.

    On a busy machine a save may not get the pool's lock in time and is given up, so a `writer` is asked again.
    """

    def __init__(self, path: Path, model: Path, writer: Callable[[], Writer] | None = None) -> None:
        self._path, self._model, self._writer = path, model, writer

    def count(self, prompt: Sequence[int], *, extra_key: str | None = None, cache_salt: str | None = None) -> int:
        """Leading pages of `prompt` of which every layer and KV head is there, in whatever shards."""
        keys = _keys(prompt, extra_key, cache_salt)
        if not self._path.exists():
            return 0
        with EmbeddedStore(self._path) as store:
            infos = self._infos(store)
            held = [store.space(info.namespace, info.shard).contains(keys) for info in infos]
        for page in range(len(keys)):
            units = {unit for info, has in zip(infos, held, strict=True) if has[page] for unit in _units(info.shard)}
            if not infos or len(units) < infos[0].namespace.num_layers * infos[0].namespace.num_kv_heads:
                return page
        return len(keys)

    def wait_for(self, prompt: Sequence[int], **tenant: str | None) -> None:
        """Wait until all full pages of `prompt` are in the pool: saving goes on after the answer. `tenant` as above."""
        pages, again_s = len(prompt) // PAGE_TOKENS, time.monotonic() + ASKED_AGAIN_S

        def are_there() -> bool:
            nonlocal again_s
            if self._writer is not None and time.monotonic() > again_s and self.count(prompt, **tenant) < pages:
                self._writer().compute(prompt, **tenant)
                again_s = time.monotonic() + ASKED_AGAIN_S
            return self.count(prompt, **tenant) == pages

        # Seldom: who looks may be in the way of who saves.
        wait_for(are_there, f"{pages} pages of the prompt in the pool", every_s=0.2)

    def remove(self, prompt: Sequence[int], page: int, *, first_head: int | None = None, **tenant: str | None) -> None:
        """Take page number `page` of `prompt` out of the pool, or its parts from this KV head on alone."""
        key = _keys(prompt, **tenant)[page]
        with EmbeddedStore(self._path) as store:
            infos = [info for info in self._infos(store) if first_head in (None, info.shard.head_start)]
            removed = [store.space(info.namespace, info.shard).remove([key]) for info in infos]
        assert sum(removed), f"page {page} is not in the pool"

    def falsify(self, prompt: Sequence[int], page: int, **tenant: str | None) -> None:
        """Replace page number `page` of `prompt` by other bytes of the same size, with a checksum that matches them."""
        key = _keys(prompt, **tenant)[page]
        with EmbeddedStore(self._path) as store:
            infos = self._infos(store)
            holders = [info for info in infos if any(store.space(info.namespace, info.shard).contains([key]))]
            assert holders, f"page {page} is not in the pool"
            for info in holders:
                space = store.space(info.namespace, info.shard)
                nbytes = info.nbytes // info.pages
                right = np.empty(nbytes, np.uint8)
                assert get_pages(space, [key], [right], nbytes=nbytes) == [True]
                wrong = right.copy()
                width = {"bfloat16": 2, "float32": 4}[info.namespace.kv_dtype]
                wrong[width - 1 :: width] ^= 0x80  # the other sign for every value: as wrong as finite ones can be
                assert space.remove([key]) == 1
                put_pages(space, [key], [wrong], parents=[None], deadline_s=60.0)
                assert space.contains([key]) == [True]

    def _infos(self, store: EmbeddedStore):  # type: ignore[no-untyped-def]
        return [info for info in store.namespaces() if Path(info.namespace.model_name) == self._model]


def _units(shard: Shard) -> Iterator[tuple[int, int]]:
    """The (layer, KV head) pairs of a shard."""
    return product(range(shard.layer_start, shard.layer_stop), range(shard.head_start, shard.head_stop))


def _keys(prompt: Sequence[int], extra_key: str | None = None, cache_salt: str | None = None) -> list[bytes]:
    return page_keys(list(prompt), PAGE_TOKENS, root=root_digest(extra_key, cache_salt))


def clear(pool: Path) -> None:
    """As a person does."""
    cleared = CliRunner().invoke(app, ["store", "clear", "--yes", "--pool", str(pool)])
    last = cleared.output.splitlines()[-1:]  # before it, who uses the pool
    assert cleared.exit_code == 0 and last and last[0].startswith("removed "), cleared.output


def wait_for(condition: Callable[[], bool], what: str, *, deadline_s: float = 120.0, every_s: float = 0.02) -> None:
    """Poll `condition` until it holds; the error says `what` did not come true."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(every_s)
