"""What the pool of this host, and the tiers behind it, have of a prompt's pages.

The pool is looked into for each question, which takes no lock. A page counts where the shards that are there make up
the whole model, in whichever way instances split it: every rank then gets its part.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_connector.config.tiers import KINDS
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded import EmbeddedSpace, EmbeddedStore

Bools = npt.NDArray[np.bool_]

TIERS_S = 0.05
"""A tier that has not said by then what it has counts as having nothing, for this question."""

Holds = Callable[[Namespace, Shard, Sequence[bytes], int, float], Sequence[tuple[str, "Future[list[bool] | None]"]]]
"""Called with (namespace, shard, keys, bytes of a page, seconds); for each tier its kind and what it will say."""


@dataclass(frozen=True, slots=True)
class Found:
    """Which pages of a chain there are: in the pool, and in tiers by their kind."""

    pool: Bools
    tiers: Mapping[str, Bools]

    def on(self, medium: str, *, here: bool) -> Bools:
        """Those that an instance reads from a medium; `here`: it is one of this host, and reads its pool and disks."""
        present = self.pool.copy() if here and medium == "CPU" else np.zeros_like(self.pool)
        for kind, found in self.tiers.items():
            if KINDS[kind].medium == medium and (here or not KINDS[kind].is_local):
                present |= found
        return present


class Pages:
    """Args:
    holds: asks the tiers, and returns at once.
    """

    def __init__(self, store: EmbeddedStore, holds: Holds) -> None:
        self._store, self._holds = store, holds

    def namespaces(self) -> list[Namespace]:
        """Those of which the pool has or had pages that mean something by themselves to several instances."""
        every = {namespace.digest: namespace for namespace, _ in self._store.spaces()}
        return [one for one in every.values() if not one.is_private and not one.rests_on_others]

    def namespace_for(
        self, modelname: str, digest: str, every: Sequence[Namespace] | None = None
    ) -> tuple[Namespace | None, str]:
        """The one of `every`, by default of `namespaces()`, that an instance reads: by the beginning of its digest, or
        else by the model's name. None where none or several fit, and why."""
        every = self.namespaces() if every is None else every
        if digest:
            fitting = [one for one in every if one.digest.hex().startswith(digest)]
            wanted = f"namespace {digest}"
        else:
            fitting = [one for one in every if modelname in (one.model_name, one.model_name.rstrip("/").split("/")[-1])]
            wanted = f"model {modelname!r}"
        if len(fitting) == 1:
            return fitting[0], ""
        seen = ", ".join(f"{one.digest.hex()[:12]} ({one.model_name})" for one in (fitting or every)[:8])
        if fitting:
            return None, f"{wanted} fits several namespaces of the pool: register with one of them: {seen}"
        return None, f"{wanted} fits no namespace of the pool, which has {seen or 'none'}"

    def look(self, namespace: Namespace) -> Look | None:
        """Where to look for a prompt's pages; None where there are none."""
        spaces = {shard: self._store.space(namespace, shard) for shard in self._store.shards(namespace)}
        return Look(namespace, spaces, self._holds) if spaces else None


class Look:
    """Looks for pages of a namespace: for those of one prompt."""

    def __init__(self, namespace: Namespace, spaces: Mapping[Shard, EmbeddedSpace], holds: Holds) -> None:
        self.namespace = namespace
        self._spaces, self._holds = spaces, holds

    def in_pool(self, keys: Sequence[bytes]) -> Bools:
        found = {shard: space.present(keys) for shard, space in self._spaces.items()}
        return whole(self.namespace, found)

    async def in_tiers(self, keys: Sequence[bytes]) -> dict[str, Bools]:
        """By the tiers' kind. Takes `TIERS_S` at most."""
        unit_nbytes = self.namespace.unit_nbytes
        if unit_nbytes is None or not keys:
            return {}
        asked = [
            (kind, shard, asyncio.ensure_future(_within(answer)))
            for shard in self._spaces
            for kind, answer in self._holds(self.namespace, shard, keys, shard.num_units * unit_nbytes, TIERS_S)
        ]
        by_kind: dict[str, dict[Shard, Bools]] = {}
        for kind, shard, answering in asked:
            if (found := await answering) is not None:
                one = by_kind.setdefault(kind, {})
                one[shard] = one.get(shard, False) | np.array(found, dtype=bool)
        return {kind: whole(self.namespace, found) for kind, found in by_kind.items()}


async def _within(answer: Future[list[bool] | None]) -> list[bool] | None:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), TIERS_S)
    except asyncio.TimeoutError:
        return None


def whole(namespace: Namespace, found: Mapping[Shard, Bools]) -> Bools:
    """For each key whether the shards that were found make up the whole model."""
    num_layers, num_heads = namespace.num_layers, namespace.num_kv_heads
    if namespace.group:  # its shards count layers and heads within the group
        group = json.loads(namespace.group)
        num_layers, num_heads = len(group["layers"]), group["num_kv_heads"]
    model = Shard(0, num_layers, 0, num_heads)
    parts = {shard: present for shard, present in found.items() if shard.common(model)}
    count = len(next(iter(found.values()))) if found else 0
    complete = np.ones(count, dtype=bool)
    for cell in model.cut(parts):
        covering = [present for shard, present in parts.items() if shard.covers(cell)]
        complete &= np.logical_or.reduce(covering, axis=0) if covering else np.zeros(count, dtype=bool)
    return complete
