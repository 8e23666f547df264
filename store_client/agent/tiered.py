"""`TieredStore`: the pool of this host, and behind it the tiers, by way of the agent.

Everything is the pool's, but for lookups of pages that it lacks: for those the agent is asked, and what it has said so
far is part of the answer. Nothing here waits for the agent.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.agent import forget
from store_client.agent.asked import Asked, Index
from store_client.agent.client import Client
from store_client.agent.clients import client_of, give_back
from store_client.agent.messages import MAX_SOUGHT
from store_client.agent.sought import Sought
from store_client.around import SpaceAround, StoreAround
from store_client.base import Lookup, Position, Seen, StoreStats
from store_client.embedded import EmbeddedStore
from store_client.embedded.space import EmbeddedSpace

_DEADLINE_S = 30.0
_SHORTEST_S, _LONGEST_S = 0.001, 3600.0
_MOST_TOKENS_S = 1e9
_MAX_SPACES = 1024
_MAX_ANSWERS = 1024
_MAX_SOUGHT_KEPT = 256
"""Each has up to `MAX_SOUGHT` keys and serves for seconds. The oldest goes first, so those under way are not lost."""
_LOOK_AGAIN_S = 0.0095
"""A chain that waits for pages is looked up over and over. While the agent says nothing new of it, the pool is looked
into again only after so long, if anything has changed there. Once it is settled what comes, lookups in between do
nothing else either. Who loads looks every 5 ms."""
_SOONEST_WORD_S = 0.0002
"""No agent answers sooner, so its words are not read before."""
_LISTEN_AGAIN_S = 0.035
"""While nothing changes in the pool, what the agent says is read only so often: that pages have landed shows there."""
_WHOLE_AGAIN_S = 0.05
"""What was there already is looked for again only after so long."""

logger = get_logger(__name__)


class TieredStore(StoreAround):
    """`store`, which it owns from now on, with the tiers that `config` lists behind it.

    Without any, the agent is there for what it serves to others, and nothing is asked of it.
    """

    def __init__(self, store: EmbeddedStore, config: Config) -> None:
        super().__init__(store)
        self._pool = store
        self.path = store.path
        """The pool folder."""
        self._client = client_of(store.path, config)
        self._has_tiers = bool(config.tiers)
        self._spaces: dict[tuple[bytes, Shard, int | None], TieredSpace] = {}
        self._closing = threading.Lock()
        """Taken by the one call of `close` that counts, and never given back."""

    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> TieredSpace:
        name = (namespace.digest, shard, nbytes)
        space = self._spaces.get(name)
        if space is None:
            if len(self._spaces) >= _MAX_SPACES:
                self._spaces.clear()
            pages = self._pool.space(namespace, shard, nbytes)
            asked_nbytes = nbytes if self._has_tiers else None
            space = self._spaces[name] = TieredSpace(pages, self._client, namespace, shard, asked_nbytes)
        return space

    def shards_elsewhere(self, namespace: Namespace) -> list[Shard]:
        return [] if namespace.is_private or not self._has_tiers else self._client.shards_elsewhere(namespace)

    def await_word(self) -> None:
        self._client.await_word()

    def stats(self) -> StoreStats:
        """Those of the pool; what this process failed to get from the agent is among the failures."""
        stats = self._inner.stats()
        return replace(stats, failures={**stats.failures, **self._client.failures})

    def take_failures(self) -> Mapping[str, int]:
        return self._client.take_failures()

    def clear(self, namespace_digest: bytes | None = None) -> int:
        """As `Store.clear`, and the agent has the tiers forget them too, sooner or later; none comes back."""
        _forget(self._client, namespace_digest)
        cleared = self._inner.clear(namespace_digest)
        _forget(self._client, namespace_digest)
        return cleared

    def close(self) -> None:
        if self._closing.acquire(blocking=False):
            give_back(self._client)
            self._inner.close()


_Found: TypeAlias = tuple[int, float, float, Position | None]
"""What the pool has of a chain: how many pages are present; when it was last asked for all of it, and when for what was
missing; and where its feed of changes ended before that: while it does, the pool has what it had."""


@dataclass(slots=True)
class _Answer:
    """The last answer to lookups of one chain. It holds until the pool is looked into again, or more is said of what
    was asked."""

    first: bytes
    num_keys: int
    present: int
    whole_s: float
    looked_s: float
    position: Position | None
    """These four as in `_Found`."""
    asked: Asked
    said: int
    holds_s: float
    """Until when it is the answer, unless the agent is heard of the ask before; 0 where that is not known."""
    listened_s: float
    """When the agent's words were last read before."""
    until_s: float
    """When a wait for the first word is no longer worth it."""
    lookup: Lookup
    lag: int | None
    """Where the ask has all that was missing then: so many keys of the chain are before its first one."""

    def goes_on(self, lookup: Lookup, found: _Found, said: int, listened_s: float) -> Lookup:
        """This is the answer from now on, for the same chain, of which the same was asked."""
        self.present, self.whole_s, self.looked_s, self.position = found
        self.lookup, self.said, self.listened_s, self.until_s = lookup, said, listened_s, math.inf
        self.holds_s = 0.0 if lookup.pending else self.looked_s + _LOOK_AGAIN_S
        return lookup

    def at(self, now_s: float) -> Lookup:
        """The answer, where time alone has passed since."""
        found = self.lookup
        return Lookup(found.pages, found.pending, found.coming, self.until_s - now_s, found.unheard)


class TieredSpace(SpaceAround):
    """A space of the pool; pages that it lacks are asked for where their size `nbytes` is known, and tiers may have
    them, which have none of a private namespace."""

    def __init__(
        self, pages: EmbeddedSpace, client: Client, namespace: Namespace, shard: Shard, nbytes: int | None
    ) -> None:
        super().__init__(pages)
        self._pages = pages
        self._client, self._namespace, self._shard = client, namespace, shard
        self._nbytes = None if namespace.is_private else nbytes
        self._asks: Index = {}
        self._answers: dict[bytes, _Answer] = {}
        """To lookups of chains that wait for pages, by their last key."""
        self._sought: dict[bytes, Sought] = {}
        """By the last key."""
        self._prefill_tokens_s: float | None = None
        self._patient = False

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        if self._nbytes is None or not keys:
            return self._inner.lookup(keys)
        now_s = time.monotonic()
        former = self._answers.get(keys[-1])
        if former is None or former.num_keys != len(keys) or former.first != keys[0]:
            self._client.listen()
            return self._answered(keys, self._look(keys, None, now_s, None), now_s, now_s)
        if now_s < former.holds_s and former.asked.said == former.said:
            return former.lookup if former.until_s == math.inf else former.at(now_s)
        return self._again(keys, former, now_s)

    def _again(self, keys: Sequence[bytes], former: _Answer, now_s: float) -> Lookup:
        """The answer after one that holds no more: by what has changed in the pool, and by what the agent says."""
        asked, found, listened_s = former.asked, None, now_s
        if asked.said == former.said and asked.settled and not former.lookup.pending:
            # The pool's feed shows whether pages have landed: while none has, the pool has what it had. That a page
            # will not come only the agent says, whose words are read now and then.
            found = self._look(keys, former, now_s, former.position)
            if found[0] < len(keys) and now_s - former.listened_s < _LISTEN_AGAIN_S:
                listened_s = former.listened_s
        if listened_s == now_s and (found is None or found[0] < len(keys)):
            self._client.listen()
        if asked.said == former.said:
            if found is None and now_s < former.until_s and now_s - former.looked_s < _LOOK_AGAIN_S:
                return former.at(now_s)
        else:
            found = None  # what it says to have landed may have since that look
        if found is None:
            found = self._look(keys, former, now_s, None)
        present, lag, said = found[0], former.lag, asked.said
        if lag is not None and not asked.done and asked.is_fresh(now_s) and self._client.ready:
            end = min(len(keys), lag + asked.coming)
            if lag <= present < end and lag + len(asked.keys) >= len(keys):
                # All that is missing was asked for before, and comes.
                return former.goes_on(Lookup(present, not asked.settled, end - present), found, said, listened_s)
        return self._answered(keys, found, now_s, listened_s)

    def _look(self, keys: Sequence[bytes], former: _Answer | None, now_s: float, since: Position | None) -> _Found:
        """How many pages are present: in full now and then, or else only what was missing. Pages that the agent has
        just said to have landed need no look, and none does while the pool's feed ends where it ended (`since`)."""
        present, whole_s, is_whole = 0, now_s, True
        if former is not None:
            is_whole = former.whole_s == former.looked_s  # or else its position speaks for a part alone
            if now_s - former.whole_s < _WHOLE_AGAIN_S:
                present, whole_s = self._landed(keys, former, now_s), former.whole_s
                since = former.position if present == former.present else None  # what is there by a word was not seen
                is_due = now_s - former.looked_s >= _LOOK_AGAIN_S or former.asked.done
                if not is_due or present >= len(keys):
                    return present, whole_s, former.looked_s, since
            elif not is_whole:
                since = None
        position, more = self._pages.leading_since(keys[present:] if present else keys, since)
        if more is None:
            return former.present if former else 0, now_s if is_whole else whole_s, now_s, position
        return present + more, whole_s, now_s, position

    def _landed(self, keys: Sequence[bytes], former: _Answer, now_s: float) -> int:
        """How many pages are present by what was found before, and by what the agent has just said."""
        present, lag = former.present, former.lag
        asked = former.asked if lag is not None else self._asks.get(keys[present])
        if asked is None or now_s - asked.landed_s >= _WHOLE_AGAIN_S:
            return present
        if lag is not None:
            return max(present, min(len(keys), lag + asked.landed))
        place = asked.place(keys[present])
        return max(present, min(self._end_of(asked, place, keys, present), present + asked.landed - place))

    def _answered(self, keys: Sequence[bytes], found: _Found, now_s: float, listened_s: float) -> Lookup:
        """The answer by what was `found`; what is missing and was not asked for is asked for."""
        present = found[0]
        if present >= len(keys) or not self._client.ready:
            return Lookup(present, unheard=present < len(keys))
        self._ask(keys, present, None, _DEADLINE_S)
        return self._answer(keys, found, now_s, listened_s)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        prefill_tokens_s: float | None = None,
        deadline_s: float = _DEADLINE_S,
        patient: bool = False,
    ) -> None:
        if prefill_tokens_s is not None and prefill_tokens_s > 0:
            self._prefill_tokens_s = min(prefill_tokens_s, _MOST_TOKENS_S)
        self._patient = self._patient or patient
        if self._nbytes is not None and self._client.ready:
            now_s = time.monotonic()
            found = self._look(keys, None, now_s, None)
            if found[0] < len(keys):
                self._ask(keys, found[0], parent, min(max(deadline_s, _SHORTEST_S), _LONGEST_S))
                self._answer(keys, found, now_s, now_s)

    def seek(self, keys: Sequence[bytes], *, prefill_s: float | None = None) -> Seen:
        """As `Space.seek`. Of more than `MAX_SOUGHT` keys the last ones."""
        before, keys = [False] * max(0, len(keys) - MAX_SOUGHT), keys[-MAX_SOUGHT:]
        if self._nbytes is None or not keys or not self._client.ready:
            return Seen(before + [False] * len(keys), unheard=self._nbytes is not None and bool(keys))
        self._client.listen()
        now_s = time.monotonic()
        sought = self._sought.get(keys[-1])
        if sought is None or not sought.is_good(keys, now_s):
            if len(self._sought) >= _MAX_SOUGHT_KEPT:
                del self._sought[next(iter(self._sought))]
            sought = self._sought[keys[-1]] = Sought(self._namespace, self._shard, list(keys), self._nbytes)
            self._client.seek(sought)
        left_s = sought.asked_s + self._client.patience.wait_s(prefill_s) - now_s
        pending = not sought.done and left_s > 0 and not self._client.is_silent(now_s)
        return Seen(before + sought.found, pending, left_s if pending else math.inf, not (pending or sought.done))

    def remove(self, keys: Sequence[bytes]) -> int:
        """As `Space.remove`, of the pool alone: what a tier has of them comes back when it is looked up."""
        return super().remove(keys)

    def clear(self) -> int:
        """As `Space.clear`. In the tiers the pages of all shards of the namespace are forgotten."""
        _forget(self._client, self._namespace.digest)
        cleared = self._inner.clear()
        _forget(self._client, self._namespace.digest)
        return cleared

    def _ask(self, keys: Sequence[bytes], missing: int, parent: bytes | None, deadline_s: float) -> None:
        """Ask for the pages from the first missing one on, unless they were asked for already."""
        at = missing
        while at < len(keys) and (asked := self._asks.get(keys[at])) is not None:
            if not asked.is_indexed:
                return  # just now
            if asked.done and asked.landed < len(asked.keys):
                return  # the chain ends there, for now
            at = self._end_of(asked, asked.place(keys[at]), keys, at)
        if at == len(keys):
            return
        wanted = list(keys[at:])
        asked = Asked(
            self._namespace, self._shard, wanted, keys[at - 1] if at else parent, self._nbytes or 0, deadline_s,
            self._prefill_tokens_s, self._asks,
        )  # fmt: skip
        self._asks[wanted[0]] = asked
        self._client.ask(asked)

    def _answer(self, keys: Sequence[bytes], found: _Found, now_s: float, listened_s: float) -> Lookup:
        """What is there and what is coming; while it is coming the answer is kept."""
        present, whole_s, looked_s, position = found
        at = present
        pending, unheard, wait_s, lag = False, False, math.inf, None
        first = self._asks.get(keys[at])
        said = 0
        if first is not None:
            said, place = first.said, first.place(keys[at])
            lag = at - place if self._end_of(first, place, keys, at) == len(keys) else None
        silent = self._client.is_silent(now_s)
        while at < len(keys) and (asked := self._asks.get(keys[at])) is not None:
            if asked.done:
                # What has landed is in the pool, or was there and is not any more.
                break
            if not asked.heard_s:
                patience_s = math.inf if self._patient else self._client.patience.wait_s(asked.prefill_s)
                left_s = asked.asked_s + patience_s - now_s
                if not silent and left_s > 0 and not pending:
                    pending, wait_s = True, left_s
                unheard = not pending
                break
            place, is_fresh = asked.place(keys[at]), asked.is_fresh(now_s)
            # It finds more and more of them, also where all that it has found has landed by now.
            pending = pending or (asked.coming > 0 and not asked.settled and is_fresh)
            if asked.coming <= place or not is_fresh:
                unheard = not (asked.settled or pending)
                break
            end = min(self._end_of(asked, place, keys, at), at + asked.coming - place)
            at = end
            if asked.coming < len(asked.keys):
                break
        lookup = Lookup(present, pending, at - present, wait_s, unheard)
        if first is not None and not first.done:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            holds_s = looked_s + _LOOK_AGAIN_S if first.settled and not pending else 0.0
            if not first.heard_s:
                holds_s = min(first.asked_s + _SOONEST_WORD_S, now_s + wait_s)
            self._answers[keys[-1]] = _Answer(
                keys[0], len(keys), present, whole_s, looked_s, position, first, said, holds_s, listened_s,
                now_s + wait_s, lookup, lag,
            )  # fmt: skip
        else:
            self._answers.pop(keys[-1], None)
        return lookup

    @staticmethod
    def _end_of(asked: Asked, place: int, keys: Sequence[bytes], at: int) -> int:
        """How far `keys` are those of the ask from its `place` on, where they meet at `at`."""
        most = min(len(keys) - at, len(asked.keys) - place)
        if keys[at + most - 1] == asked.keys[place + most - 1]:
            return at + most
        differ = bisect_left(range(most), True, key=lambda i: keys[at + i] != asked.keys[place + i])
        return at + differ


def _forget(client: Client, namespace: bytes | None) -> None:
    """Before the pool is cleared, so that nothing is fetched meanwhile; and after it, for what a tier got by then."""
    try:
        forget.mark(client.pool, namespace)
    except OSError as error:
        client.failures["agent_mark"] += 1
        said = "pages that are cleared may come back from a tier, no mark can be left in %s: %s"
        log_once("agent.mark", said, client.pool, error, logger=logger)
    client.forget()
