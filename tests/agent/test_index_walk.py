"""The index looks at as much of a prompt as anybody has, and answers as if it had looked at all of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys, root_digest
from mooncake_connector.kv.namespace import Namespace
from store_client.agent.index import parts
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Context
from store_client.agent.index.index import Index
from store_client.agent.index.pages import Pages
from store_client.agent.index.requests import Registration, decode_query
from store_client.testing import namespace

WHOLE = [Shard(0, 4, 0, 2)]
HALVES = [Shard(0, 4, 0, 1), Shard(0, 4, 1, 2)]
DISK_KINDS, CPU_KINDS, LOCAL_KINDS = ("disk", "folder"), ("mooncake",), ("disk",)


@dataclass
class Pool:
    """Stands in for an `EmbeddedStore`: which keys are in which shard."""

    of: Namespace
    shards_of: dict[Shard, set[bytes]]
    asked: list[int] = field(default_factory=list)
    """Keys of each call."""

    def spaces(self) -> list[tuple[Namespace, Shard]]:
        return [(self.of, shard) for shard in self.shards_of]

    def shards(self, of: Namespace) -> list[Shard]:
        return list(self.shards_of)

    def space(self, of: Namespace, shard: Shard) -> Any:
        def present(keys: Sequence[bytes]) -> Any:
            self.asked.append(len(keys))
            return np.array([key in self.shards_of[shard] for key in keys], dtype=bool)

        return mock.Mock(present=present)


@dataclass
class Behind:
    """Stands in for the tiers: what each kind has of each shard, None for one that is late."""

    kinds: dict[str, dict[Shard, set[bytes]] | None]
    asked: list[int] = field(default_factory=list)

    def holds(self, of: Namespace, shard: Shard, keys: Sequence[bytes], nbytes: int, allowed_s: float) -> Any:
        answers = []
        for kind, shards in self.kinds.items():
            self.asked.append(len(keys))
            answer: Future[list[bool] | None] = Future()
            answer.set_result(None if shards is None else [key in shards[shard] for key in keys])
            answers.append((kind, answer))
        return answers


@dataclass(frozen=True)
class Kept:
    """Entries of a prompt that somebody has: from one on, before another, without some."""

    start: int
    stop: int
    gaps: frozenset[int]

    def of(self, names: Sequence[Any]) -> set[Any]:
        return {name for at, name in enumerate(names) if self.start <= at < self.stop and at not in self.gaps}


kept = st.builds(
    Kept, st.sampled_from([0, 0, 0, 0, 1, 7]), st.sampled_from([0, 1, 5, 20, 60, 10**6]),
    st.frozensets(st.integers(0, 60), max_size=4),
)  # fmt: skip
shards = st.sampled_from([WHOLE, WHOLE, HALVES])


@dataclass(frozen=True)
class Owner:
    medium: str
    size: int
    salt: str
    kept: Kept


@dataclass(frozen=True)
class Rank:
    instance_id: str
    dp_rank: int
    here: bool
    salt: str
    owners: tuple[Owner, ...]


owners = st.builds(
    Owner, st.sampled_from(["GPU", "GPU", "CPU", "DISK"]), st.sampled_from([1, 4, 6, 16]),
    st.sampled_from(["", "", "s"]), kept,
)  # fmt: skip
ranks = st.builds(
    Rank, st.sampled_from("ab"), st.integers(0, 2), st.booleans(), st.sampled_from(["", "", "s"]),
    st.lists(owners, max_size=3, unique_by=lambda one: (one.medium, one.size)).map(tuple),
)  # fmt: skip


@dataclass(frozen=True)
class World:
    num_tokens: int
    page_tokens: int
    block_size: int
    salt: str | None
    ranks: list[Rank]
    shards: list[Shard]
    pool: list[Kept]
    """Of each shard."""
    tiers: dict[str, list[Kept] | None]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    split = draw(shards)
    pages = st.lists(kept, min_size=len(split), max_size=len(split))
    return World(
        draw(st.integers(0, 320)), draw(st.sampled_from([1, 4, 16, 40])), draw(st.sampled_from([1, 4, 16])),
        draw(st.sampled_from([None, None, "s"])),
        draw(st.lists(ranks, max_size=4, unique_by=lambda one: (one.instance_id, one.dp_rank))), split, draw(pages),
        draw(st.dictionaries(st.sampled_from([*DISK_KINDS, *CPU_KINDS]), st.none() | pages, max_size=2)),
    )  # fmt: skip


def tokens_of(world: World) -> list[int]:
    return np.random.default_rng(7).integers(0, 150_000, world.num_tokens).tolist()


def keys_in(world: World, tokens: Sequence[int]) -> list[bytes]:
    return page_keys(tokens, world.page_tokens, root=root_digest(None, world.salt or None))


def stood_up(world: World) -> tuple[Index, Pool, Behind]:
    tokens = tokens_of(world)
    keys = keys_in(world, tokens)
    stored = [one.of(keys) for one in world.pool]
    pool = Pool(namespace(page_tokens=world.page_tokens), dict(zip(world.shards, stored, strict=True)))
    tiers = {
        kind: every and {shard: one.of(keys) for shard, one in zip(world.shards, every, strict=True)}
        for kind, every in world.tiers.items()
    }
    behind = Behind(tiers)  # type: ignore[arg-type]
    index = Index(Pages(pool, behind.holds))  # type: ignore[arg-type]
    for rank in world.ranks:
        instance, _ = index.register(
            Registration(
                instance_id=rank.instance_id, dp_rank=rank.dp_rank, modelname="m", block_size=world.block_size,
                type="vLLM", pool=rank.here, additionalsalt=rank.salt,
            )
        )  # fmt: skip
        assert instance is not None
        for owner in rank.owners:
            number = instance.owners[owner.medium, owner.size] = index.held.new_owner()
            names = seq_hashes(np.array(tokens, dtype=np.uint32), owner.size)
            index.held.add(Context(owner.size, "", owner.salt), number, owner.kept.of(names))
    return index, pool, behind


def answered(index: Index, world: World, tokens: Sequence[int], between: str = ", ") -> Any:
    listed = between.join(map(str, tokens))
    salt = json.dumps(world.salt)
    body = f'{{"model": "m", "block_size": {world.block_size}, "cache_salt": {salt}, "token_ids": [{listed}]}}'
    return asyncio.run(index.query(*decode_query(body.encode(), index.parts)))


def leading(entries: Iterable[tuple[Sequence[bool], int]], num_tokens: int) -> int:
    """Tokens before the first that is in none of these: whether each entry is there, and its tokens."""
    covered = np.zeros(num_tokens + 1, dtype=bool)
    for there, size in entries:
        each = np.repeat(np.array(there, dtype=bool), size)
        covered[: len(each)] |= each
    return int(covered.argmin())


def expected(world: World) -> dict[str, Any]:
    """By looking at everything."""
    tokens = tokens_of(world)
    num_tokens = len(tokens) // world.block_size * world.block_size
    tokens = tokens[:num_tokens]
    keys = keys_in(world, tokens)

    def whole(every: Sequence[Kept]) -> list[bool]:
        return [all(key in one for one in (kept.of(keys) for kept in every)) for key in keys]

    found: dict[str, dict[str, Any]] = {}
    for rank in world.ranks:
        media: dict[str, list[tuple[Sequence[bool], int]]] = {"GPU": [], "CPU": [], "DISK": []}
        if rank.here:
            media["CPU"].append((whole(world.pool), world.page_tokens))
        for kind, tier in world.tiers.items():
            if tier is not None and (rank.here or kind not in LOCAL_KINDS):
                media["CPU" if kind in CPU_KINDS else "DISK"].append((whole(tier), world.page_tokens))
        for owner in rank.owners:
            if owner.salt == (world.salt or rank.salt):
                names = seq_hashes(np.array(tokens, dtype=np.uint32), owner.size)
                has = owner.kept.of(names)
                media[owner.medium].append(([name in has for name in names], owner.size))
        answer = found.setdefault(rank.instance_id, {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}})
        for medium, entries in media.items():
            answer[medium] = max(answer[medium], leading(entries, num_tokens))
        matched = leading([one for entries in media.values() for one in entries], num_tokens)
        answer["DP"][str(rank.dp_rank)] = matched
        answer["longest_matched"] = max(answer["longest_matched"], matched)
    return {"default": found}


@pytest.fixture(scope="module", autouse=True)
def parts_are_small():
    """About ten tokens."""
    with mock.patch.object(parts, "_PART_NBYTES", 64), mock.patch.object(parts, "_PART_TOKENS", 10):
        yield


@settings(deadline=None, max_examples=examples(400))
@given(worlds(), st.integers(0, 320))
def test_the_answer_is_that_of_looking_at_all_of_the_prompt(world, asked_before):
    index, _, _ = stood_up(world)
    tokens = tokens_of(world)
    answered(index, world, tokens[:asked_before])
    for between in (", ", ", ", ",", "\n,"):
        assert answered(index, world, tokens, between) == expected(world)


NOBODY = Kept(0, 0, frozenset())
FIRST = Kept(0, 2, frozenset())
ALL = Kept(0, 10**6, frozenset())


def world(gpu: Kept = NOBODY, pool: Kept = NOBODY, **tiers: list[Kept] | None) -> World:
    rank = Rank("a", 0, True, "", (Owner("GPU", 4, "", gpu),))
    return World(320, 4, 4, None, [rank], WHOLE, [pool], tiers)


@pytest.fixture
def named(monkeypatch) -> list[int]:
    """Tokens of each call that hashes some."""
    named = []

    def counted(make):
        def call(tokens, *given, **others):
            named.append(len(tokens))
            return make(tokens, *given, **others)

        return call

    monkeypatch.setattr(parts, "page_keys", counted(parts.page_keys))
    monkeypatch.setattr(parts, "seq_hashes", counted(parts.seq_hashes))
    return named


def test_of_a_prompt_that_nobody_has_the_first_part_is_named_alone(named):
    here = world(gpu=ALL, pool=ALL)
    index, pool, _ = stood_up(here)
    other = [token + 1 for token in tokens_of(here)]
    named.clear()
    assert answered(index, here, other)["default"]["a"]["longest_matched"] == 0
    assert len(named) == 2 and max(named) < 20 and max(pool.asked) < 5
    named.clear()
    assert answered(index, here, tokens_of(here))["default"]["a"]["longest_matched"] == 320
    assert sum(named) >= 2 * 320


def test_what_nobody_has_anything_of_is_not_named_at_all(named):
    bare = World(320, 4, 4, None, [Rank("a", 0, True, "", (Owner("GPU", 4, "another", ALL),))], [], [], {})
    index, _, _ = stood_up(bare)
    named.clear()
    assert answered(index, bare, tokens_of(bare))["default"]["a"]["longest_matched"] == 0
    assert not named


def test_it_goes_on_while_one_or_another_has_the_next_entry(named):
    gap = Kept(0, 10**6, frozenset({1, 30}))
    there = world(gpu=gap, pool=Kept(1, 31, frozenset({40})))
    index, _, _ = stood_up(there)
    assert answered(index, there, tokens_of(there))["default"]["a"]["longest_matched"] == 320


def test_tiers_are_asked_once_about_what_was_looked_at(named):
    for pool in (NOBODY, FIRST, ALL):
        there = world(pool=pool, disk=[pool])
        index, looked, behind = stood_up(there)
        answered(index, there, tokens_of(there))
        assert behind.asked == [sum(looked.asked)]


def test_a_tier_that_goes_on_beyond_everybody_else_is_asked_once_more_for_the_rest():
    there = world(pool=FIRST, disk=[ALL])
    index, looked, behind = stood_up(there)
    assert answered(index, there, tokens_of(there))["default"]["a"]["DISK"] == 320
    assert len(behind.asked) == 2 and sum(behind.asked) == sum(looked.asked) == 80
