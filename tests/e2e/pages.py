"""The test's own look into a pool that servers use: which pages of a prompt are there, and what if they were wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mooncake_connector.keys import page_keys, root_digest
from store_client import EmbeddedStore, Space

PAGE_TOKENS = 64

__all__ = ["PAGE_TOKENS", "Pages", "wait_for"]


class Pages:
    """Pages of one model in the pool at `path`; every call opens the pool anew, as any other process would."""

    def __init__(self, path: Path, model: Path) -> None:
        self._path, self._model = path, model

    def count(self, prompt: Sequence[int], *, cache_salt: str | None = None) -> int:
        """Leading pages of `prompt` that every shard ever written for this model has."""
        keys = _keys(prompt, cache_salt)
        if not self._path.exists():
            return 0
        with EmbeddedStore(self._path) as store:
            return min((space.prefix(keys) for space in self._spaces(store)), default=0)

    def wait_for(self, prompt: Sequence[int], *, cache_salt: str | None = None) -> None:
        """Wait until all full pages of `prompt` are in the pool: saving goes on after the answer."""
        pages = len(prompt) // PAGE_TOKENS
        wait_for(
            lambda: self.count(prompt, cache_salt=cache_salt) == pages,
            f"{pages} pages of the prompt in the pool",
        )

    def falsify(self, prompt: Sequence[int], page: int) -> None:
        """Replace page number `page` of `prompt` by other bytes of the same size, with a checksum that matches them."""
        key = _keys(prompt, None)[page]
        with EmbeddedStore(self._path) as store:
            for info in self._infos(store):
                space = store.space(info.namespace, info.shard)
                nbytes = info.nbytes // info.pages
                right = np.empty(nbytes, np.uint8)
                assert space.get([key], [right], nbytes=nbytes) == [True]
                wrong = right.copy()
                wrong[1::2] ^= 0x80  # the other sign for every bfloat16: as wrong as finite values can be
                assert space.remove([key]) == 1
                space.put([key], [wrong], parents=[None], deadline_s=5.0)
                assert space.contains([key]) == [True]

    def _infos(self, store: EmbeddedStore):  # type: ignore[no-untyped-def]
        return [info for info in store.namespaces() if Path(info.namespace.model_name) == self._model]

    def _spaces(self, store: EmbeddedStore) -> list[Space]:
        return [store.space(info.namespace, info.shard) for info in self._infos(store)]


def _keys(prompt: Sequence[int], cache_salt: str | None) -> list[bytes]:
    return page_keys(list(prompt), PAGE_TOKENS, root=root_digest(None, cache_salt))


def wait_for(condition: Callable[[], bool], what: str, *, deadline_s: float = 30.0) -> None:
    """Poll `condition` until it holds; the error says `what` did not come true."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.02)
