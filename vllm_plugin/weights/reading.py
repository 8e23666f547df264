"""What workers say of the weights that they have in memory. Plain data; the digest itself is `digest`'s."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import reduce

from mooncake_connector.kv.namespace import canonical_json


@dataclass(frozen=True, slots=True)
class Reading:
    """Of some ranks of an instance.

    Args:
        number: of the request that it answers; 0 for the first reading.
        ranks: how many.
        parts: sums over what each has of parameters that are split.
        alike: (PP rank, sums) of parameters that all TP ranks of a stage are to have alike.
        by_rank: some weights were taken as they lie on their rank.
        cause: why a rank could not read its weights; empty where all could.
    """

    number: int
    ranks: int = 1
    parts: tuple[int, int] = (0, 0)
    alike: frozenset[tuple[int, int, int]] = frozenset()
    by_rank: bool = False
    cause: str = ""

    def merge(self, other: Reading) -> Reading:
        first, second = ((mine + its) % 2**64 for mine, its in zip(self.parts, other.parts, strict=True))
        return Reading(
            self.number,
            self.ranks + other.ranks,
            (first, second),
            self.alike | other.alike,
            self.by_rank or other.by_rank,
            self.cause or other.cause,
        )

    @property
    def weights(self) -> tuple[tuple[int, int], frozenset[tuple[int, int, int]]]:
        """What two readings of one instance have in common where its weights are the same."""
        return self.parts, self.alike

    def digest(self, config: str, tp_size: int, pp_size: int) -> str:
        """Of these weights in a model of such a configuration: 64 hex digits.

        Instances of any TP size have the same, unless weights were taken as they lie, or ranks of a stage differ where
        they should not. Pipeline parallelism is part of it.
        """
        differ = len(self.alike) > len({stage for stage, *_ in self.alike})
        split = [tp_size] if self.by_rank or differ else []
        said = canonical_json([config, list(self.parts), sorted(self.alike), [*split, pp_size]])
        return hashlib.sha256(b"mooncake-connector-weights-v1" + said.encode("ascii")).hexdigest()


def merged(readings: list[Reading | None], num_ranks: int) -> Reading | None:
    """What all ranks say together; None where one does not."""
    said = [reading for reading in readings if reading is not None]
    if not said or len(said) != len(readings):
        return None
    whole = reduce(Reading.merge, said)
    return whole if whole.ranks == num_ranks else None
