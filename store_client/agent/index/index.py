"""`Index`: the instances that routers have registered, and how much of a prompt each has, by medium and rank.

The pool and the tiers are asked anew for each question (`pages`); what is in engines' own memory, events say (`held`).
One thread at a time registers and asks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Bools, Context, Held
from store_client.agent.index.pages import Found, Pages
from store_client.agent.index.places import is_here
from store_client.agent.index.requests import (
    Asked,
    Query,
    QueryByHash,
    Refused,
    Registration,
    Unregistration,
    read_hashes,
    read_page_keys,
    read_tokens,
)

MAX_INSTANCES = 1024
MEDIA = ("GPU", "CPU", "DISK")

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class Instance:
    """A registered rank of an instance."""

    registered: Registration
    here: bool
    """Whether it reads the pool of this host."""
    owners: dict[str, int] = field(default_factory=dict)
    """Its number in what is held, by medium."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is asked for: blocks by rolling hash, and where tokens or page keys are given, pages."""

    num_tokens: int
    hashes: Sequence[int]
    found: Found | None
    page_tokens: int


class Index:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.held = Held()
        self.instances: dict[tuple[str, str, int], Instance] = {}
        self.counts: Counter[str] = Counter()
        """For the metrics."""

    def register(self, registration: Registration) -> tuple[Instance | None, str]:
        """The instance, None where it was registered just so before; and a remark for people. Raises Refused."""
        known = self.instances.get(registration.key)
        if known is not None and known.registered != registration:
            raise Refused(f"{registration.name} is registered with other values: unregister it first", 409, "conflict")
        if known is None and len(self.instances) >= MAX_INSTANCES:
            raise Refused(f"{MAX_INSTANCES} instances are registered: unregister those that are gone", 409, "full")
        _, remark = self._pages.namespace_for(registration.modelname, registration.namespace)
        if known is not None:
            return None, remark
        here = is_here(registration.endpoint) if registration.pool is None else registration.pool
        instance = self.instances[registration.key] = Instance(registration, here)
        logger.info("instance %s of %s is registered", registration.name, registration.modelname)
        return instance, remark

    def unregister(self, wanted: Unregistration) -> Instance:
        """Raises Refused."""
        key = (wanted.instance_id, wanted.tenant_id or "default", wanted.dp_rank)
        instance = self.instances.pop(key, None)
        if instance is None:
            name = "|".join(map(str, key))
            raise Refused(f"{name} is not registered: `GET /services` lists what is", 404, "unknown")
        logger.info("instance %s is no longer registered", instance.registered.name)
        return instance

    def services(self) -> list[dict[str, Any]]:
        """What is registered, for people."""
        listed = []
        for instance in self.instances.values():
            registered = instance.registered
            namespace, why = self._pages.namespace_for(registered.modelname, registered.namespace)
            listed.append(
                {
                    "instance_id": registered.instance_id, "tenant_id": registered.tenant,
                    "dp_rank": registered.dp_rank, "modelname": registered.modelname,
                    "block_size": registered.block_size, "endpoint": registered.endpoint, "pool": instance.here,
                    "namespace": namespace.digest.hex() if namespace is not None else None, "remark": why,
                }
            )  # fmt: skip
        return listed

    async def query(self, query: Query) -> dict[str, Any]:
        """The answer to `/query`. Raises Refused."""
        tokens = read_tokens(query.token_ids)
        num_blocks = len(tokens) // query.block_size
        tokens = tokens[: num_blocks * query.block_size]
        asked = self._asked(query)
        hashes: list[int] = seq_hashes(tokens, query.block_size) if any(one.owners for one in asked) else []
        answers: dict[Instance, _Prompt] = {}
        for namespace, instances in self._by_namespace(asked, query.lora).items():
            found = None
            if namespace is not None:
                salt = query.cache_salt or ""
                found = await self._pages.look(namespace, self._pages.keys(namespace, tokens, salt))
            prompt = _Prompt(len(tokens), hashes, found, namespace.page_tokens if namespace is not None else 1)
            answers |= dict.fromkeys(instances, prompt)
        return self._answer(query, asked, answers)

    async def query_by_hash(self, query: QueryByHash) -> dict[str, Any]:
        """The answer to `/query_by_hash`. Pages of the pool and of tiers have names that do not follow from these
        hashes: they count where the caller gives them. Raises Refused."""
        hashes, keys = read_hashes(query), read_page_keys(query)
        asked = self._asked(query)
        answers: dict[Instance, _Prompt] = {}
        num_tokens = len(hashes) * query.block_size
        for namespace, instances in self._by_namespace(asked, query.lora).items():
            found = None
            if namespace is not None and keys is not None:
                found = await self._pages.look(namespace, keys[: num_tokens // namespace.page_tokens])
            prompt = _Prompt(num_tokens, hashes, found, namespace.page_tokens if namespace is not None else 1)
            answers |= dict.fromkeys(instances, prompt)
        return self._answer(query, asked, answers)

    def _asked(self, query: Asked) -> list[Instance]:
        return [
            instance
            for instance in self.instances.values()
            if instance.registered.tenant == query.tenant
            and instance.registered.modelname == query.model
            and instance.registered.block_size == query.block_size
            and query.instance_id in (None, "", instance.registered.instance_id)
        ]

    def _by_namespace(self, asked: Iterable[Instance], lora: str) -> dict[Namespace | None, list[Instance]]:
        """None: of which no pages are known. Pages of an adapter are named by its files, which nobody here has."""
        known: dict[tuple[str, str], Namespace | None] = {}
        grouped: dict[Namespace | None, list[Instance]] = {}
        for instance in asked:
            name = (instance.registered.modelname, instance.registered.namespace)
            if name not in known:
                known[name], why = (None, "") if lora else self._pages.namespace_for(*name)
                if why:
                    self.counts["without_namespace"] += 1
                    log_once(f"index.namespace:{name}", "the index does not look into the pool: %s", why, logger=logger)
            grouped.setdefault(known[name], []).append(instance)
        return grouped

    def _answer(self, query: Asked, asked: list[Instance], prompts: dict[Instance, _Prompt]) -> dict[str, Any]:
        instances: dict[str, dict[str, Any]] = {}
        salt, loras = query.cache_salt or "", query.lora
        presents: dict[str, dict[int, Bools]] = {}
        paged: dict[tuple[int, bool], dict[str, Bools]] = {}
        for instance in asked:
            prompt, own_salt = prompts[instance], salt or instance.registered.salt
            if own_salt not in presents:
                presents[own_salt] = self.held.present(Context(query.block_size, loras, own_salt), prompt.hashes)
            seen = (id(prompt), instance.here)
            if seen not in paged:
                paged[seen] = _on_media(prompt, instance.here)
            own = {
                medium: presents[own_salt][owner]
                for medium, owner in instance.owners.items()
                if owner in presents[own_salt]
            }
            _add(instances.setdefault(instance.registered.instance_id, _nothing()), instance, prompt, query.block_size,
                 own, paged[seen])  # fmt: skip
        return {query.tenant: instances}


def _nothing() -> dict[str, Any]:
    return {"longest_matched": 0, **dict.fromkeys(MEDIA, 0), "DP": {}}


def _on_media(prompt: _Prompt, here: bool) -> dict[str, Bools]:
    """Which pages there are for an instance that is here or elsewhere; media without any left out."""
    if prompt.found is None:
        return {}
    found = {medium: prompt.found.on(medium, here=here) for medium in ("CPU", "DISK")}
    return {medium: present for medium, present in found.items() if present.any()}


def _add(
    answer: dict[str, Any], instance: Instance, prompt: _Prompt, block_tokens: int, own: dict[str, Bools],
    pages: dict[str, Bools],
) -> None:  # fmt: skip
    """Take a rank into its instance's answer: of several ranks the best counts."""
    together: list[tuple[Bools, int]] = []
    for medium in MEDIA:
        parts = [(own[medium], block_tokens)] if medium in own else []
        parts += [(pages[medium], prompt.page_tokens)] if medium in pages else []
        together += parts
        answer[medium] = max(answer[medium], _leading(parts))
    matched = _leading(together)
    rank = str(instance.registered.dp_rank)
    answer["DP"][rank] = max(answer["DP"].get(rank, 0), matched)
    answer["longest_matched"] = max(answer["longest_matched"], matched)


def _leading(parts: Sequence[tuple[Bools, int]]) -> int:
    """Leading tokens that one or another of the parts has, each with the tokens of one of its entries."""
    if not parts:
        return 0
    if len(parts) == 1:
        present, step = parts[0]
        return step * (len(present) if present.all() else int(present.argmin()))
    unit = math.gcd(*(step for _, step in parts))
    spread = [np.repeat(present, step // unit) for present, step in parts]
    union = np.zeros(max(map(len, spread)), dtype=bool)
    for present in spread:
        union[: len(present)] |= present
    return unit * (len(union) if union.all() else int(union.argmin()))
