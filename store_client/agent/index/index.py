"""`Index`: the instances that routers have registered, and how much of a prompt each has, by medium and rank.

The pool and the tiers are asked anew for each question (`pages`); what is in engines' own memory, events say (`held`).
One thread at a time registers and asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_connector.kv.keys import root_digest
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.agent.index.held import Context, Entries, Held, Run, union
from store_client.agent.index.pages import Found, Pages
from store_client.agent.index.parts import Names, Parts, Prompt, names_of_blocks, names_of_pages
from store_client.agent.index.places import is_here
from store_client.agent.index.requests import (
    MAX_HASHES,
    Asked,
    Query,
    QueryByHash,
    Refused,
    Registration,
    Unregistration,
    read_hashes,
    read_page_keys,
)
from store_client.agent.index.walk import BlockLine, PageLine, Walk

MAX_INSTANCES = 1024
MEDIA = ("GPU", "CPU", "DISK")

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class Instance:
    """A registered rank of an instance."""

    registered: Registration
    here: bool
    """Whether it reads the pool of this host."""
    owners: dict[tuple[str, int], int] = field(default_factory=dict)
    """Its number in what is held, by medium and tokens of a block."""


@dataclass(frozen=True, slots=True)
class _Paged:
    """Instances that read the same pages, and which of a prompt's there are; None where none are known."""

    instances: list[Instance]
    found: Found | None
    page_tokens: int


class Index:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.held = Held()
        self.parts = Parts()
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
        listed, every = [], self._pages.namespaces()
        for instance in self.instances.values():
            registered = instance.registered
            namespace, why = self._pages.namespace_for(registered.modelname, registered.namespace, every)
            listed.append(
                {
                    "instance_id": registered.instance_id, "tenant_id": registered.tenant,
                    "dp_rank": registered.dp_rank, "modelname": registered.modelname,
                    "block_size": registered.block_size, "endpoint": registered.endpoint, "pool": instance.here,
                    "namespace": namespace.digest.hex() if namespace is not None else None, "remark": why,
                }
            )  # fmt: skip
        return listed

    async def query(self, query: Query, prompt: Prompt) -> dict[str, Any]:
        """The answer to `/query` of this prompt."""
        num_tokens = prompt.num_tokens // query.block_size * query.block_size
        asked = self._asked(query)
        blocks = dict[Context, BlockLine]()
        names = dict[int, Names[int]]()
        for context in self._contexts(query, asked):
            size = context.block_tokens
            if size not in names:
                names[size] = names_of_blocks(prompt, self.parts, size)
            blocks[context] = BlockLine(self.held, context, names[size], min(num_tokens // size, MAX_HASHES))
        root, pages = root_digest(None, query.cache_salt or None), list[tuple[list[Instance], PageLine | None, int]]()
        for namespace, instances in self._by_namespace(asked, query.lora):
            if namespace is None or (look := self._pages.look(namespace)) is None:
                pages.append((instances, None, 1))
                continue
            step = namespace.page_tokens
            line = PageLine(look, names_of_pages(prompt, self.parts, step, root), num_tokens // step)
            pages.append((instances, line, step))
        await Walk(prompt, [*blocks.values(), *(line for _, line, _ in pages if line is not None)]).go()
        paged = [_Paged(instances, line.found() if line is not None else None, step) for instances, line, step in pages]
        return self._answer(query, paged, lambda context: blocks[context].runs() if context in blocks else {})

    def _contexts(self, query: Query, asked: Sequence[Instance]) -> set[Context]:
        """Those of which somebody has blocks."""
        owned = {(size, query.cache_salt or one.registered.salt) for one in asked for _, size in list(one.owners)}
        every = {Context(size, query.lora, salt) for size, salt in owned}
        return {context for context in every if context in self.held}

    async def query_by_hash(self, query: QueryByHash) -> dict[str, Any]:
        """The answer to `/query_by_hash`. Pages of the pool and of tiers have names that do not follow from these
        hashes: they count where the caller gives them. Raises Refused."""
        hashes, keys = read_hashes(query), read_page_keys(query)
        paged = list[_Paged]()
        num_tokens = len(hashes) * query.block_size
        for namespace, instances in self._by_namespace(self._asked(query), query.lora):
            found, step = None, namespace.page_tokens if namespace is not None else 1
            if namespace is not None and keys is not None and (look := self._pages.look(namespace)) is not None:
                asked = keys[: num_tokens // step]
                found = Found(look.in_pool(asked), await look.in_tiers(asked))
            paged.append(_Paged(instances, found, step))

        def runs(context: Context) -> Mapping[int, Run]:
            return self.held.present(context, hashes) if context.block_tokens == query.block_size else {}

        return self._answer(query, paged, runs)

    def _asked(self, query: Asked) -> list[Instance]:
        return [
            instance
            for instance in self.instances.values()
            if instance.registered.modelname == query.model
            and instance.registered.block_size == query.block_size
            and instance.registered.tenant == query.tenant
            and query.instance_id in (None, "", instance.registered.instance_id)
        ]

    def _by_namespace(self, asked: Sequence[Instance], lora: str) -> list[tuple[Namespace | None, list[Instance]]]:
        """None: of which no pages are known. Pages of an adapter are named by its files, which nobody here has."""
        named: dict[tuple[str, str], list[Instance]] = {}
        for instance in asked:
            named.setdefault((instance.registered.modelname, instance.registered.namespace), []).append(instance)
        if lora:
            return [(None, instances) for instances in named.values()]
        every, grouped = self._pages.namespaces() if asked else [], dict[Namespace | None, list[Instance]]()
        for name, instances in named.items():
            namespace, why = self._pages.namespace_for(*name, every)
            if why:
                self.counts["without_namespace"] += 1
                log_once("index.namespace", "the index does not look into the pool: %s", why, logger=logger)
            grouped.setdefault(namespace, []).extend(instances)
        return list(grouped.items())

    def _answer(
        self, query: Asked, every: Sequence[_Paged], runs_in: Callable[[Context], Mapping[int, Run]]
    ) -> dict[str, Any]:
        """Of all that a question costs this is the part that grows with the number of instances."""
        instances: dict[str, dict[str, Any]] = {}
        presents: dict[tuple[int, str], Mapping[int, Run]] = {}
        for of in every:
            paged: dict[bool, list[tuple[str, Run]]] = {}
            for instance in of.instances:
                registered, here = instance.registered, instance.here
                salt = query.cache_salt or registered.salt
                if (pages := paged.get(here)) is None:
                    pages = paged[here] = _on_media(of, here)
                runs = pages.copy()
                for (medium, size), owner in list(instance.owners.items()):
                    if (present := presents.get((size, salt))) is None:
                        present = presents[size, salt] = runs_in(Context(size, query.lora, salt))
                    if (run := present.get(owner)) is not None:
                        runs.append((medium, run))
                if (answer := instances.get(registered.instance_id)) is None:
                    answer = instances[registered.instance_id] = {**_NOTHING, "DP": {}}
                _add(answer, str(registered.dp_rank), runs)
        return {query.tenant: instances}


_NOTHING: dict[str, Any] = {"longest_matched": 0, **dict.fromkeys(MEDIA, 0)}


def _on_media(of: _Paged, here: bool) -> list[tuple[str, Run]]:
    """Which pages there are for an instance that is here or elsewhere; media without any left out."""
    if of.found is None:
        return []
    found = {medium: of.found.on(medium, here=here) for medium in ("CPU", "DISK")}
    return [(medium, Entries(present, of.page_tokens)) for medium, present in found.items() if present.any()]


def _add(answer: dict[str, Any], rank: str, runs: Sequence[tuple[str, Run]]) -> None:
    """Take a rank into its instance's answer: of several ranks the best counts."""
    media = dict(runs)
    for medium, run in media.items():
        matched = run.tokens if len(media) == len(runs) else union([its for of, its in runs if of == medium])
        if matched > answer[medium]:
            answer[medium] = matched
    if len(runs) != 1:
        matched = union([run for _, run in runs])
    ranks = answer["DP"]
    if matched >= ranks.get(rank, 0):
        ranks[rank] = matched
    if matched > answer["longest_matched"]:
        answer["longest_matched"] = matched
