"""A room for each of the parallel samples of a request (`n` above 1).

The router draws one bootstrap room a request. SGLang sends all samples under it, and before them one more request that
fills the prefix cache; senders and receivers are told apart by their rooms. Both sides meet them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_APART = 720720 << 6
"""Rooms of one request differ by this: any number of data-parallel ranks that people have divides it, and SGLang finds
the rank of a request by the remainder."""
_HALF = 1 << 62
_MOST_OPEN = 1024


class Rooms:
    """Those of which not all samples have come yet."""

    def __init__(self) -> None:
        self._num_given: dict[int, int] = {}

    def give(self, room: int, num_samples: int) -> int:
        """The room of the next request under `room`."""
        number = self._num_given.pop(room, 0)
        if number < num_samples:
            self._num_given[room] = number + 1
        if len(self._num_given) > _MOST_OPEN:  # requests whose samples never came
            del self._num_given[next(iter(self._num_given))]
        return room + number * _APART if room < _HALF else room - number * _APART


def with_own_rooms(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around the scheduler's handling of a new request."""
    rooms = Rooms()

    def handle(handle: Callable[..., Any], scheduler: Any, recv_req: Any, **more: Any) -> Any:
        if recv_req.bootstrap_room is not None and recv_req.sampling_params.n > 1 and is_ours():
            recv_req.bootstrap_room = rooms.give(recv_req.bootstrap_room, recv_req.sampling_params.n)
        return handle(scheduler, recv_req, **more)

    return handle
