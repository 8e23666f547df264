"""The library is never called with what it has let go of: over real cards."""

from __future__ import annotations

import itertools

import pytest

from transfer.transports.base import Region
from transfer.transports.rdma.opened import open_cards
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.vectors import address_of

pytestmark = pytest.mark.inside


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_things_are_closed_in_any_order_and_used_after_it_they_are_an_error(order: tuple[int, ...]) -> None:
    card, *others = open_cards([], RdmaSettings())
    queue = card.completion_queue(2)
    pair = card.queue_pair(queue, 2)
    window = card.window()
    chain = Chain(1, 1)
    card.register(Region(address_of(chain.requests), chain.requests.nbytes), by_window=True)
    for end in [[card.close, queue.close, pair.close, window.close][which] for which in order]:
        end()
        end()
    for use in (lambda: pair.post(chain), pair.fail, lambda: queue.poll(1), queue.notify, card.window):
        with pytest.raises(OSError, match="is closed"):
            use()
    with pytest.raises(OSError, match="is closed"):
        card.completion_queue(2)
    for other in others:
        other.close()
