"""The threads in which the library moves bytes.

It waits for its own threads by asking them in a loop, and so takes a core from them, and from engines, for as long as
a call lasts. These threads give way to all others: on two cores that made two calls at once up to half as fast again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from store_client.tiers.base import TierError
from store_client.tiers.mooncake.memory import Range
from store_client.tiers.workers import Workers

_AT_ONCE = 6
"""As many as the agent has under way, reads and writes."""
_NICENESS = 19
"""Below the agent's other threads that move bytes: those work, these wait."""


class Movers:
    def __init__(self, title: str) -> None:
        self._title = title
        self._workers = Workers(f"move-{title}", _AT_ONCE, _NICENESS)

    def move(
        self, call: Callable[..., Any], names: Sequence[str], buffers: Sequence[Sequence[Range]], *config: Any,
        deadline_s: float,
    ) -> list[int]:  # fmt: skip
        """A call of the library for pages, by their names and where they lie; the status of each. Waits until it is
        back. Raises TierError where it did not begin by the deadline."""
        starts = [[one.start for one in parts] for parts in buffers]
        sizes = [[one.stop - one.start for one in parts] for parts in buffers]
        (codes,) = self._workers.run([lambda: list(call(list(names), starts, sizes, *config))], deadline_s)
        if isinstance(codes, TimeoutError):
            raise TierError(f"tier {self._title}: {_AT_ONCE} calls of the library are not back", "timeout")
        if isinstance(codes, BaseException):
            raise codes
        return codes

    def close(self) -> None:
        self._workers.close()
