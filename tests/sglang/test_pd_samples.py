"""Parallel samples of one request have rooms of their own, and both sides give the same ones."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_backend.pd import samples
from sglang_backend.pd.samples import Rooms, with_own_rooms


def test_each_sample_and_the_request_that_warms_the_cache_has_its_own_room() -> None:
    one, other = Rooms(), Rooms()
    for room in (5, (1 << 63) - 1):
        given = [one.give(room, 2) for _ in range(3)]
        assert given == [other.give(room, 2) for _ in range(3)]
        assert len(set(given)) == 3 and all(0 <= each < 1 << 63 for each in given)
        for ranks in range(1, 17):
            assert {each % ranks for each in given} == {room % ranks}
        assert one.give(room, 2) == room, "the next request under this room begins anew"


def test_rooms_whose_samples_never_come_are_forgotten() -> None:
    rooms = Rooms()
    for room in range(3 * samples._MOST_OPEN):
        rooms.give(room, 2)
    assert len(rooms._num_given) == samples._MOST_OPEN


def test_single_requests_and_other_backends_keep_their_room() -> None:
    seen = []
    for is_ours, num_samples, expected in ((True, 1, [7, 7]), (False, 2, [7, 7]), (True, 2, [7, 7 + samples._APART])):
        handle = with_own_rooms(lambda is_ours=is_ours: is_ours)
        for _ in range(2):
            asked = SimpleNamespace(bootstrap_room=7, sampling_params=SimpleNamespace(n=num_samples))
            handle(lambda scheduler, recv_req, **more: seen.append(recv_req.bootstrap_room), None, asked)
        assert seen == expected
        seen.clear()
    none = SimpleNamespace(bootstrap_room=None, sampling_params=SimpleNamespace(n=2))
    with_own_rooms(lambda: True)(lambda scheduler, recv_req, **more: seen.append(recv_req.bootstrap_room), None, none)
    assert seen == [None]
