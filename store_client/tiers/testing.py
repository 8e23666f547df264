"""The conformance class of tiers: what any of them must do. Inherit it in a test and give it a fixture `make_tier`.

class TestMine(TierConformance):
    @pytest.fixture
    def make_tier(self):
        return lambda: MyTier(...)      # with room for at least 64 MiB; other tests' pages may be in it

Each test uses a namespace of its own, so that one server or folder does for all. Only `clear(None)` forgets everything.
The arena is mapped memory that is registered first, and pieces begin at multiples of 4 KiB in it, as the agent's do.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Put
from store_client.testing import PAGE_NBYTES, SHARD, chain, page_bytes
from store_client.tiers.base import SEAL_NBYTES, Pieces, Sealed, SpaceName, Target, Tier, TierError
from store_client.tiers.seal import seal, why_broken

DEADLINE_S = 60.0
GRANULE = 4096
SECRET = b"the secret of a deployment in tests"

MakeTier = Callable[[], Tier]


class Memory:
    """Mapped memory that hands out the pieces of pages, as the pool's arena does; what is handed out holds noise."""

    def __init__(self, nbytes: int = 32 << 20) -> None:
        self.all: Bytes = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self.all[:] = 0xA5
        self._next = 0
        self._lock = threading.Lock()

    def page(self, nbytes: int, pieces: int = 1) -> list[Bytes]:
        """`nbytes` in at most so many pieces, apart from each other, all but the last of whole granules."""
        whole = -(-nbytes // GRANULE)
        pieces = min(pieces, whole)
        bounds = [whole * i // pieces * GRANULE for i in range(pieces)] + [nbytes]
        return [self._piece(stop - start) for start, stop in itertools.pairwise(bounds)]

    def _piece(self, nbytes: int) -> Bytes:
        with self._lock:
            start = self._next
            self._next += (-(-nbytes // GRANULE) + 1) * GRANULE
        if start + nbytes > len(self.all):
            raise MemoryError(f"{len(self.all)} bytes of memory are used up")
        return self.all[start : start + nbytes]


def new_space(shard: Shard = SHARD) -> SpaceName:
    """A namespace that nobody has used."""
    return SpaceName(os.urandom(32), shard)


def joined(pieces: Pieces) -> Bytes:
    whole: Bytes = np.concatenate([np.zeros(0, dtype=np.uint8), *pieces])
    return whole


def sealed(memory: Memory, space: SpaceName, key: bytes, nbytes: int = PAGE_NBYTES, pieces: int = 1) -> Sealed:
    """The page `key` with its right bytes, in memory."""
    page, place, at = page_bytes(key, nbytes), memory.page(nbytes, pieces), 0
    for piece in place:
        piece[:] = page[at : at + len(piece)]
        at += len(piece)
        piece.flags.writeable = False
    return Sealed(key, place, seal(space, key, place, xxhash.xxh3_64_intdigest(page.data), SECRET))


def write(
    tier: Tier, memory: Memory, space: SpaceName, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES, pieces: int = 1
) -> list[Put]:
    pages = [sealed(memory, space, key, nbytes, pieces) for key in keys]
    return tier.write(space, pages, nbytes=nbytes, deadline_s=DEADLINE_S)


def read(
    tier: Tier, memory: Memory, space: SpaceName, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES, pieces: int = 1
) -> list[bool]:
    """Which pages are there; each must be whole and as it was written, seal and bytes."""
    targets = [Target(key, memory.page(nbytes, pieces)) for key in keys]
    seals = tier.read(space, targets, nbytes=nbytes, deadline_s=DEADLINE_S)
    assert len(seals) == len(keys)
    for (key, place), found in zip(targets, seals, strict=True):
        if found is not None:
            page = joined(place)
            assert why_broken(found, space, key, place, xxhash.xxh3_64_intdigest(page.data), SECRET) is None
            assert np.array_equal(page, page_bytes(key, nbytes)), key.hex()
    return [found is not None for found in seals]


def contains(tier: Tier, space: SpaceName, keys: Sequence[bytes], nbytes: int = PAGE_NBYTES) -> list[bool]:
    return tier.contains(space, keys, nbytes=nbytes, deadline_s=DEADLINE_S)


def mistake(call: Callable[[], object]) -> str:
    """What the ValueError of a call says, which it must raise."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("a caller's mistake was no ValueError")


class _Used:
    """A tier while a test uses it, with memory that is registered."""

    def __init__(self, make_tier: MakeTier) -> None:
        self._make_tier = make_tier

    def __enter__(self) -> tuple[Tier, Memory]:
        self._tier, memory = self._make_tier(), Memory()
        self._tier.register(memory.all)
        return self._tier, memory

    def __exit__(self, *exc_info: object) -> None:
        self._tier.close()


class TierConformance:
    """Claims about every tier."""

    def test_what_was_never_written_is_a_miss(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 3)
            assert contains(tier, space, keys) == [False] * 3
            assert read(tier, memory, space, keys) == [False] * 3
            assert tier.remove(space, keys, deadline_s=DEADLINE_S) == 0

    def test_empty_calls_are_allowed(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space = new_space()
            assert contains(tier, space, []) == []
            assert read(tier, memory, space, []) == []
            assert write(tier, memory, space, []) == []
            assert tier.remove(space, [], deadline_s=DEADLINE_S) == 0

    def test_what_was_written_is_read_back(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 16)
            assert write(tier, memory, space, keys) == [Put.STORED] * 16
            assert contains(tier, space, keys) == [True] * 16
            assert read(tier, memory, space, keys) == [True] * 16
            (absent,) = chain("b", 1)
            assert read(tier, memory, space, [keys[3], absent, keys[1]]) == [True, False, True]
            assert contains(tier, space, [absent, keys[0]]) == [False, True]

    def test_a_second_write_leaves_the_first_bytes(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 2)
            assert write(tier, memory, space, keys[:1]) == [Put.STORED]
            other = Sealed(keys[0], memory.page(PAGE_NBYTES), b"x" * SEAL_NBYTES)
            pages = [other, sealed(memory, space, keys[1])]
            outcome = tier.write(space, pages, nbytes=PAGE_NBYTES, deadline_s=DEADLINE_S)
            assert outcome == [Put.PRESENT, Put.STORED]
            assert read(tier, memory, space, keys) == [True] * 2

    def test_a_key_twice_in_one_write_is_stored_once(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, (key,) = new_space(), chain("a", 1)
            assert sorted(write(tier, memory, space, [key, key]), key=str) == [Put.PRESENT, Put.STORED]
            assert read(tier, memory, space, [key]) == [True]

    def test_a_page_of_another_size_is_a_miss(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 2)
            write(tier, memory, space, keys)
            for nbytes in (PAGE_NBYTES // 2, PAGE_NBYTES - 1, PAGE_NBYTES + 1, 2 * PAGE_NBYTES):
                assert read(tier, memory, space, keys, nbytes) == [False] * 2, nbytes
            assert read(tier, memory, space, keys) == [True] * 2

    def test_odd_sizes_are_kept_exactly_and_nothing_is_written_beside_them(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space = new_space()
            for nbytes in (1, 511, 4095, 4096, 4097, 65537, 1 << 20):
                (key,) = chain(f"odd {nbytes}", 1)
                assert write(tier, memory, space, [key], nbytes, pieces=2) == [Put.STORED], nbytes
                beside = memory.all[memory._next :].copy()
                place = memory._next + (-(-nbytes // GRANULE)) * GRANULE
                assert read(tier, memory, space, [key], nbytes) == [True], nbytes
                assert np.array_equal(memory.all[place:], beside[place - len(memory.all) :]), nbytes
                whole = memory.all[place - (-nbytes % GRANULE) : place]
                assert (whole == 0xA5).all(), f"{nbytes}: bytes behind the page were changed"

    def test_pages_in_several_pieces_are_the_same_pages(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space = new_space()
            for nbytes in (5 * GRANULE, 5 * GRANULE + 777):
                keys = chain(f"pieces {nbytes}", 3)
                for key, pieces in zip(keys, (1, 2, 5), strict=True):
                    assert write(tier, memory, space, [key], nbytes, pieces) == [Put.STORED]
                for pieces in (1, 3, 5):
                    assert read(tier, memory, space, keys, nbytes, pieces) == [True] * 3

    def test_memory_that_was_never_registered_will_do(self, make_tier: MakeTier) -> None:
        tier, memory, space, keys = make_tier(), Memory(), new_space(), chain("a", 2)
        try:
            assert write(tier, memory, space, keys) == [Put.STORED] * 2
            assert read(tier, memory, space, keys, pieces=4) == [True] * 2
        finally:
            tier.close()

    def test_namespaces_and_shards_never_meet(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 2)
            write(tier, memory, space, keys)
            others = [new_space(), space._replace(shard=Shard(4, 8, 0, 2)), space._replace(shard=Shard(0, 4, 2, 4))]
            for other in others:
                assert contains(tier, other, keys) == [False] * 2
                assert read(tier, memory, other, keys) == [False] * 2
                assert tier.remove(other, keys, deadline_s=DEADLINE_S) == 0
            assert write(tier, memory, others[1], keys[:1]) == [Put.STORED]
            assert read(tier, memory, others[1], keys) == [True, False]
            assert read(tier, memory, space, keys) == [True] * 2

    def test_remove_forgets_these_pages_alone(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 4)
            write(tier, memory, space, keys)
            assert tier.remove(space, [keys[1], *chain("absent", 1)], deadline_s=DEADLINE_S) == 1
            assert contains(tier, space, keys) == [True, False, True, True]
            assert read(tier, memory, space, keys) == [True, False, True, True]
            assert write(tier, memory, space, [keys[1]]) == [Put.STORED]
            assert read(tier, memory, space, keys) == [True] * 4

    def test_clear_forgets_one_namespace_in_all_its_shards(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, other, keys = new_space(), new_space(), chain("a", 3)
            beside = space._replace(shard=Shard(4, 8, 0, 2))
            for where in (space, beside, other):
                write(tier, memory, where, keys)
            assert tier.clear(space.namespace, deadline_s=DEADLINE_S) == 6
            for where, there in ((space, False), (beside, False), (other, True)):
                assert contains(tier, where, keys) == [there] * 3
                assert read(tier, memory, where, keys) == [there] * 3
            assert tier.clear(space.namespace, deadline_s=DEADLINE_S) == 0
            assert write(tier, memory, space, keys) == [Put.STORED] * 3

    def test_the_shards_of_a_namespace_are_told(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, other, keys = new_space(), new_space(Shard(0, 8, 0, 1)), chain("a", 2)
            assert tier.shards(space.namespace, deadline_s=DEADLINE_S) == []
            beside = space._replace(shard=Shard(4, 8, 0, 2))
            for where in (space, beside, other):
                write(tier, memory, where, keys)
            shards = tier.shards(space.namespace, deadline_s=DEADLINE_S)
            assert len(shards) == 2 and set(shards) == {space.shard, beside.shard}
            tier.clear(space.namespace, deadline_s=DEADLINE_S)
            write(tier, memory, beside, keys[:1])
            assert beside.shard in tier.shards(space.namespace, deadline_s=DEADLINE_S)
            assert tier.shards(other.namespace, deadline_s=DEADLINE_S) == [other.shard]

    def test_clear_of_everything_forgets_all_namespaces(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            spaces, keys = [new_space(), new_space()], chain("a", 2)
            for space in spaces:
                write(tier, memory, space, keys)
            assert tier.clear(None, deadline_s=DEADLINE_S) >= 4
            for space in spaces:
                assert contains(tier, space, keys) == [False] * 2
                assert read(tier, memory, space, keys) == [False] * 2

    def test_threads_that_write_and_read_the_same_pages_see_whole_ones(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys, wrong = new_space(), chain("a", 12), list[BaseException]()
            stored, seen, lock = list[Put](), list[bool](), threading.Lock()

            def work(number: int) -> None:
                try:
                    for first in range(0, 12, 4):
                        mine = keys[first : first + 4]
                        outcome = write(tier, memory, space, mine, pieces=1 + number % 3)
                        found = read(tier, memory, space, mine, pieces=1 + (number + 1) % 3)
                        with lock:
                            stored.extend(outcome)
                            seen.extend(found)
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong, wrong
            assert Put.FAILED not in stored and stored.count(Put.STORED) >= 12
            assert len(seen) == 72 and all(seen)

    def test_a_call_without_time_returns_and_harms_nothing(self, make_tier: MakeTier) -> None:
        """It may raise TierError, or do what it could by then."""
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 4)
            write(tier, memory, space, keys[:2])
            started_s = time.monotonic()
            late = [sealed(memory, space, key) for key in keys]
            calls: list[Callable[[], object]] = [
                lambda: tier.contains(space, keys, nbytes=PAGE_NBYTES, deadline_s=0),
                lambda: tier.write(space, late, nbytes=PAGE_NBYTES, deadline_s=0),
                lambda: tier.read(
                    space, [Target(key, memory.page(PAGE_NBYTES)) for key in keys], nbytes=PAGE_NBYTES, deadline_s=0
                ),
            ]
            for call in calls:
                try:
                    call()
                except TierError as error:
                    assert error.cause
            assert time.monotonic() - started_s < DEADLINE_S, "it took its time nonetheless"
            assert read(tier, memory, space, keys)[:2] == [True, True]

    def test_stats_count_what_is_there(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, keys = new_space(), chain("a", 4)
            before = tier.stats()
            write(tier, memory, space, keys)
            tier.tidy(DEADLINE_S)
            after = tier.stats()
            if before.pages is not None and after.pages is not None:
                assert after.pages >= 4
            if after.used_nbytes is not None:
                assert after.used_nbytes >= 4 * PAGE_NBYTES
            assert read(tier, memory, space, keys) == [True] * 4, "tidying removes nothing that is in use"

    def test_mistakes_of_the_caller_are_errors(self, make_tier: MakeTier) -> None:
        with _Used(make_tier) as (tier, memory):
            space, (key,) = new_space(), chain("a", 1)
            page = sealed(memory, space, key)
            short = Target(key[:31], memory.page(PAGE_NBYTES))
            for call in (
                lambda: contains(tier, space, [key[:31]]),
                lambda: tier.read(space, [short], nbytes=PAGE_NBYTES, deadline_s=1),
                lambda: tier.write(space, [page._replace(key=key + b"x")], nbytes=PAGE_NBYTES, deadline_s=1),
                lambda: tier.remove(space, [b""], deadline_s=1),
            ):
                assert "expected 32" in mistake(call)
            small = [Target(key, memory.page(PAGE_NBYTES // 2))]
            assert "bytes" in mistake(lambda: tier.read(space, small, nbytes=PAGE_NBYTES, deadline_s=1))
            assert "bytes" in mistake(lambda: tier.write(space, [page], nbytes=PAGE_NBYTES // 2, deadline_s=1))
            unsealed = [page._replace(seal=b"short")]
            assert "seal" in mistake(lambda: tier.write(space, unsealed, nbytes=PAGE_NBYTES, deadline_s=1))

    def test_a_closed_tier_says_so(self, make_tier: MakeTier) -> None:
        tier = make_tier()
        tier.close()
        tier.close()
        try:
            contains(tier, new_space(), chain("a", 1))
        except TierError as error:
            assert error.cause == "unavailable"
        else:
            raise AssertionError("a closed tier gave an answer")
