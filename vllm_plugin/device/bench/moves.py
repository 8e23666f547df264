"""Loads and saves as a worker of vLLM runs them: jobs of a mover between a store and blocks in device memory."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from functools import partial

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.base import Bytes, Digests, SettleFirst, Store
from store_client.jobs import Job, Load, Save
from store_client.mover import Mover
from store_client.sharded import ShardView
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.device.bench.cache import Cache
from vllm_plugin.device.bench.models import PAGE_TOKENS
from vllm_plugin.device.opening import locks_for, open_device

_DEADLINE_S = 60.0
_STOP_S = 10.0
_SLAB_NBYTES = 128 << 20
"""As `device_slab` has it."""
_LOCKS_STAND_S, _LOCKS_DEADLINE_S = 2.5, 60.0
"""The pool locks a piece within a second of the last one, or is through."""


class MeasureError(MooncakeConnectorError):
    """What was to be measured went wrong: a figure of it would mean nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class _BegunSave(Save):
    """By a device."""

    ended: SettleFirst

    @property
    def settle(self) -> SettleFirst:
        return self.ended


class Moves:
    """Of one cache. Pages have keys by the label that they are given; each label's first word has its own space.

    Raises MeasureError where the cache's device does not move pages by itself.
    """

    def __init__(self, store: Store, cache: Cache) -> None:
        self._store, self._cache, self._fmt = store, cache, cache.fmt
        fmt, where = cache.fmt, cache.tensors[0].device
        blocks = KVBlocks(cache.tensors, fmt.whole, fmt, None)
        locks = locks_for(where)
        self._device = None if locks is None else open_device(where, locks, _SLAB_NBYTES, fmt.nbytes)
        pages = None if self._device is None else self._device.pages(blocks, fmt.whole, fmt)
        if locks is None or pages is None:
            raise MeasureError(f"{where} does not move pages by itself; a line above says why")
        self._pages, self._locks = pages, locks
        store.lock_memory(locks)
        self._loads: Mover[Load] = Mover("load")
        self._saves: Mover[Save] = Mover("save")

    def __enter__(self) -> Moves:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for mover in (self._loads, self._saves):
            mover.stop(_STOP_S)
        if self._device is not None:
            self._device.close()

    def wait_for_locks(self) -> int:
        """Until the pool's memory is page-locked as far as it will be; bytes that are."""
        give_up_s = time.monotonic() + _LOCKS_DEADLINE_S
        nbytes, since_s = self._locks.nbytes, time.monotonic()
        while time.monotonic() < min(give_up_s, since_s + _LOCKS_STAND_S):
            time.sleep(0.05)
            if self._locks.nbytes != nbytes:
                nbytes, since_s = self._locks.nbytes, time.monotonic()
        return nbytes

    def save(self, label: str) -> None:
        """Save the source's pages. Raises MeasureError where one is not stored."""
        job = self._save(label)
        self._saves.run(job)
        self._check(job)
        if job.stored < len(job.keys):
            raise MeasureError(f"{len(job.keys) - job.stored} of {len(job.keys)} pages were in the pool before")

    def load(self, label: str, num_pages: int | None = None) -> None:
        """Load the first pages into the target's blocks, all by default. Raises MeasureError where one is lost."""
        job = self._load(label, num_pages)
        self._loads.run(job)
        self._check(job)

    def both(self, loaded: str, saved: str) -> None:
        """One of each, at once."""
        load, save = self._load(loaded, None), self._save(saved)
        self._saves.submit(save)
        self._loads.run(load)
        save.over.wait(_DEADLINE_S)
        self._saves.take_ended()
        self._check(load)
        self._check(save)

    def clear(self, label: str) -> None:
        """Forget what was saved."""
        self._view(label).own.clear()

    def check_pages(self, label: str) -> None:
        """Hold the first and the last page in the pool against the cache's tokens. Raises MeasureError."""
        numbers = [0, self._cache.num_pages - 1]
        keys = self._keys(label, self._cache.num_pages)
        found: dict[int, bytes] = {}

        def consume(index: int, part: Shard, page: Bytes) -> None:
            found[numbers[index]] = page.tobytes()

        self._view(label).read([keys[number] for number in numbers], consume)
        for number in numbers:
            if found.get(number) != self._cache.page(number):
                raise MeasureError(f"page {number} in the pool is not what the blocks hold")

    def _check(self, job: Job) -> None:
        if job.pages < len(job.keys):
            raise MeasureError(f"{job.pages} of {len(job.keys)} pages were moved: {job.cause or 'late'}")

    def _load(self, label: str, num_pages: int | None) -> Load:
        def copy(number: int, part: Shard, page: Bytes) -> None:
            self._pages.load_page(part, self._cache.target, number * PAGE_TOKENS, page, 0)

        return Load(
            keys=self._keys(label, num_pages or self._cache.num_pages),
            view=partial(self._view, label),
            deadline_s=_DEADLINE_S,
            copy=copy,
            settle=self._pages.settle_loads,
        )

    def _save(self, label: str) -> Save:
        def copy(number: int, page: Bytes) -> None:
            self._pages.save_page(self._cache.source, number * PAGE_TOKENS, page)

        def settle(count: int) -> Digests:
            return self._pages.settle_saves(self._pages.settled + count)

        return _BegunSave(
            keys=self._keys(label, self._cache.num_pages),
            view=partial(self._view, label),
            deadline_s=_DEADLINE_S,
            parent=None,
            copy=copy,
            ended=settle,
        )

    def _view(self, label: str) -> ShardView:
        fmt = self._fmt
        namespace = Namespace(
            model_name=label.partition(" ")[0],
            model_digest=label.partition(" ")[0],
            kv_dtype="bfloat16",
            num_layers=fmt.num_layers,
            num_kv_heads=fmt.num_heads,
            head_dim=fmt.k_dim,
            page_tokens=fmt.page_tokens,
        )
        return ShardView(self._store, namespace, fmt.whole, fmt.unit_nbytes)

    @staticmethod
    def _keys(label: str, count: int) -> list[bytes]:
        return [hashlib.sha256(f"{label}/{number}".encode()).digest() for number in range(count)]
