"""The events of one publisher, and what they make of the blocks that its instance holds. Opens no socket.

Nothing is claimed that is not known: after a gap that was not replayed, a restart or a lost connection every block of
the instance is forgotten, and those that are stored from then on count. Where blocks lie in their prompts is kept,
since it follows from their content: so the ones that come next find their parents.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from store_client.agent.index.events import Batch, Cleared, Event, Hash, Junk, Removed, Stored, events_of
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Context, Held
from store_client.agent.index.index import Instance

MAX_BLOCKS = 1 << 20
"""Of one publisher: so many are held, and of so many the place in a prompt is remembered."""
MAX_CONTEXTS = 1 << 16
"""Salts and adapters of one publisher that are told apart; with the next one all is forgotten."""
_MAX_SIZES = 4
_MAX_TEXT = 1024

_NAME_BITS = 64
_NAME = (1 << _NAME_BITS) - 1


class Stream:
    """Args:
    ignored: media of which the publisher's word is not needed, since the pool is looked into.
    """

    def __init__(self, instance: Instance, held: Held, ignored: frozenset[str], counts: Counter[str]) -> None:
        self._instance, self._held, self._ignored, self._counts = instance, held, ignored, counts
        self.expected = 0
        """The sequence number that comes next, as far as is known."""
        self.is_known = False
        """Whether everything from there on was seen."""
        self._time_s = 0.0
        """Of the last batch, by the publisher's clock."""
        self._contexts: dict[Context, int] = {}
        self._numbered: list[Context] = []
        self._places: dict[Hash, int] = {}
        """Of each block its rolling hash, and in the bits above that the number of its context: plain integers, since
        the garbage collector would look at millions of anything else again and again."""
        self._holding: dict[tuple[str, int], dict[Hash, int]] = {}
        """The same of blocks that are held, by medium and group."""

    # -- order ---------------------------------------------------------------------------------------------------

    def order(self, number: int, batch: Batch) -> str:
        """What a batch is: "next", "again" (it was seen), "restarted", or "gap" where some before it are missing."""
        if self.is_known and number < self.expected:
            return "restarted" if batch.time_s > self._time_s else "again"
        return "next" if number == self.expected and (self.is_known or number == 0) else "gap"

    def take(self, number: int, batch: Batch) -> None:
        """The batch is the next one."""
        self.expected, self.is_known, self._time_s = number + 1, True, batch.time_s
        for event in events_of(batch):
            if isinstance(event, Junk):
                self._counts["junk"] += 1
            elif event is not None:
                self._counts["events"] += 1
                self._apply(event)

    def begin_at(self, number: int) -> None:
        """What was before is not known."""
        self.drop()
        self.expected, self.is_known = number, True

    def drop(self) -> None:
        """Forget what the instance holds."""
        self._let_all_go()
        self.expected, self.is_known = 0, False

    def _let_all_go(self) -> None:
        for (medium, group), held in self._holding.items():
            self._let_go(medium, group, held)
        self._holding.clear()

    # -- content -------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(len(held) for held in self._holding.values())

    def _apply(self, event: Event) -> None:
        match event:
            case Stored():
                if event.medium not in self._ignored:
                    self._store(event)
            case Removed():
                held = self._holding.get((event.medium, event.group), {})
                gone = {name: held.pop(name) for name in event.hashes if name in held}
                self._let_go(event.medium, event.group, gone)
            case Cleared():
                for (medium, group), held in list(self._holding.items()):
                    if event.medium in (None, medium):
                        self._let_go(medium, group, held)
                        del self._holding[medium, group]

    def _store(self, event: Stored) -> None:
        placed, key = self._placed(event), (event.medium, event.group)
        if placed is None or self.num_blocks >= MAX_BLOCKS or not self._may_be(placed[0]):
            self._counts["unplaced_blocks"] += len(event.hashes)
            return
        context, names = placed
        if len(self._contexts) >= MAX_CONTEXTS and context not in self._contexts:
            self._counts["forgotten_contexts"] += len(self._contexts)
            self._let_all_go()
            self._places, self._contexts, self._numbered = {}, {}, []
        held = self._holding.setdefault(key, {})
        above = self._contexts.setdefault(context, len(self._contexts)) << _NAME_BITS
        places = {own: above | name for own, name in zip(event.hashes, names, strict=True)}
        elsewhere = {own: was for own, place in places.items() if (was := held.get(own, place)) != place}
        self._let_go(*key, elsewhere)  # no engine gives two blocks one hash
        held.update(places)
        self._places.update(places)
        while len(self._places) > MAX_BLOCKS:
            del self._places[next(iter(self._places))]
        # One hash may come twice in an event: what is not held is not let go.
        self._held.add(context, self._owner(event.medium, context.block_tokens), [p & _NAME for p in places.values()])
        self._counts["stored_blocks"] += len(names)

    def _may_be(self, context: Context) -> bool:
        """Engines have blocks of one size, or a few; each is hashed anew for every question."""
        sizes = {size for _, size in self._instance.owners}
        is_known = context.block_tokens in sizes or len(sizes) < _MAX_SIZES
        return is_known and 0 < context.block_tokens <= 1 << 16 and len(context.lora) + len(context.salt) <= _MAX_TEXT

    def _placed(self, event: Stored) -> tuple[Context, list[int]] | None:
        """The context and the rolling hashes of the blocks; None where they cannot be known."""
        registered = self._instance.registered
        tokens, block_tokens = event.tokens, event.block_tokens or registered.block_size
        lora, salt = event.lora or registered.lora, event.salt or registered.salt
        if tokens is None:  # the hashes say it themselves
            return Context(block_tokens, lora, salt), [name for name in event.hashes if isinstance(name, int)]
        if block_tokens <= 0 or len(tokens) != block_tokens * len(event.hashes):
            return None
        context, parent = Context(block_tokens, lora, salt), None
        if event.parent is not None:
            place = self._places.get(event.parent)
            if place is None:
                return None
            context, parent = self._context(place), place & _NAME
            if context.block_tokens != block_tokens:
                return None
        try:
            values = np.array(tokens, dtype=np.int64)
        except OverflowError:
            return None
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < 1 << 32:
            return None
        return context, seq_hashes(values.astype(np.uint32), block_tokens, parent)

    def _context(self, place: int) -> Context:
        number = place >> _NAME_BITS
        if number >= len(self._numbered):
            self._numbered = list(self._contexts)
        return self._numbered[number]

    def _owner(self, medium: str, block_tokens: int) -> int:
        owners = self._instance.owners
        if (medium, block_tokens) not in owners:
            owners[medium, block_tokens] = self._held.new_owner()
        return owners[medium, block_tokens]

    def _let_go(self, medium: str, group: int, gone: dict[Hash, int]) -> None:
        by_context: dict[int, list[int]] = {}
        for place in gone.values():
            by_context.setdefault(place >> _NAME_BITS, []).append(place & _NAME)
        for number, names in by_context.items():
            context = self._context(number << _NAME_BITS)
            self._held.remove(context, self._owner(medium, context.block_tokens), names)

    def close(self) -> None:
        """The instance is no longer registered."""
        self.drop()
        for owner in self._instance.owners.values():
            self._held.drop_owner(owner)
        self._instance.owners.clear()
