"""A wish under way: what the plan remembers of it, of the questions it asks of tiers, and of its batches of pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from store_client.agent.wish import Wish, Word

LANDED = ""
"""What became of a page that is in the pool."""
BEHIND = "behind"
"""Why a page that a tier may have was not taken from it: the one before it did not come."""


@dataclass(eq=False, slots=True)
class Question:
    """Which of a chain's keys has the tier?"""

    chain: Chain
    tier: int
    start: int
    count: int

    @property
    def keys(self) -> Sequence[bytes]:
        return self.chain.wish.keys[self.start : self.start + self.count]


@dataclass(eq=False, slots=True)
class Batch:
    """Consecutive pages of a chain that are to be fetched from one tier."""

    tier: int
    wish: Wish
    """Whose namespace, shard and size they have."""
    clears: int
    keys: list[bytes]
    parents: list[bytes | None]
    wanted: list[dict[Chain, int]]
    """Of each page, who wants it, as which of its keys."""
    after: Batch | None
    """The batch of the page before the first one, where that was under way."""
    released: bool = False
    begun: bool = False
    """Whether it was given to its tier: its pages are settled then."""
    followed: bool = False
    """Whether another batch comes after it, so that nothing can be put between them."""
    ended: bool = False
    whole: bool = False
    """Whether all of it is in the pool."""
    publishing: bool = False
    followers: list[Batch] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether pages behind its last one may join it."""
        return not (self.begun or self.followed or self.ended)

    def add(self, chain: Chain, at: int) -> None:
        wish = chain.wish
        self.keys.append(wish.keys[at])
        self.parents.append(wish.keys[at - 1] if at else wish.parent)
        self.wanted.append({chain: at})

    def chains(self) -> set[Chain]:
        return {chain for wanted in self.wanted for chain in wanted}


@dataclass(eq=False, slots=True)
class Chain:
    """A wish under way."""

    wish: Wish
    tell: Callable[[Word], None]
    deadline: float
    clears: int
    answers: list[bytearray]
    """By tier, for each key."""
    here: bytearray
    """For each key, whether it landed."""
    limit: int
    """Keys from here on are not tried any more."""
    sizes: list[int]
    """By tier, keys of its next question."""
    questions: list[Question | None]
    """By tier, the one under way."""
    refused: set[int] = field(default_factory=set)
    """Tiers from which fetching would take longer than computing."""
    sources: list[int] = field(default_factory=list)
    """The tier of each leading key that was found."""
    taken: dict[int, int] = field(default_factory=dict)
    """By tier, pages that were put into batches."""
    committed: int = 0
    """Leading keys that landed or are in batches."""
    landed: int = 0
    cause: str = ""
    last: Word = field(default_factory=Word)
    words: list[Word] = field(default_factory=list)
    """To be told."""
    telling: bool = False

    @property
    def done(self) -> bool:
        return self.last.done
