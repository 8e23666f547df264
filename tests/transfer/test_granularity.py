"""How a transfer is divided: every layer and token in exactly one batch, as early as its granularity allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.plan.granularity import Batch, Bounds, Divider, Granularity
from transfer.transports.base import TransferError

FULL, CHUNK, LAYER = Granularity


@given(st.data())
def test_every_layer_and_token_is_in_one_batch_and_none_before_it_is_computed(data):
    model_layers = data.draw(st.integers(1, 5))
    first = data.draw(st.integers(0, model_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, model_layers)))
    unit = data.draw(st.integers(1, 4))
    tokens = range(unit * data.draw(st.integers(0, 3)), unit * 3 + data.draw(st.integers(0, 12)))
    granularity = data.draw(st.sampled_from(Granularity))
    divider = Divider(granularity, layers, tokens, unit, min_layers=data.draw(st.integers(1, 4)))
    chunks = sorted(data.draw(st.sets(st.integers(1, 40), max_size=4)) | {tokens.stop})
    written = np.zeros((model_layers, 64), dtype=int)
    for stop in (chunk for chunk in chunks if chunk <= tokens.stop):
        for layer in range(model_layers):
            for batch in divider.computed(layer, stop):
                assert batch.first_layer + batch.num_layers <= layer + 1 and batch.stop_token <= stop
                assert batch.first_token % unit == 0 and (
                    batch.stop_token % unit == 0 or batch.stop_token == tokens.stop
                )
                assert batch.places > 0
                written[
                    batch.first_layer : batch.first_layer + batch.num_layers, batch.first_token : batch.stop_token
                ] += 1
    assert divider.complete
    expected = np.zeros_like(written)
    expected[layers.start : layers.stop, tokens.start : tokens.stop] = 1
    assert (written == expected).all()


def replay(granularity: Granularity, min_layers: int = 1, unit: int = 4) -> list[tuple[int, int, list[Batch]]]:
    """What travels when of 3 layers and 10 tokens computed in chunks of 5."""
    divider = Divider(granularity, range(3), range(10), unit, min_layers)
    calls = [(layer, stop) for stop in (5, 10) for layer in range(3)]
    found = [(layer, stop, divider.computed(layer, stop)) for layer, stop in calls]
    return [(layer, stop, batches) for layer, stop, batches in found if batches]


def test_full_waits_for_the_last_layer_of_the_last_token():
    assert replay(FULL) == [(2, 10, [Batch(0, 3, 0, 10)])]


def test_chunk_sends_all_layers_of_the_whole_units_of_each_chunk():
    assert replay(CHUNK) == [(2, 5, [Batch(0, 3, 0, 4)]), (2, 10, [Batch(0, 3, 4, 10)])]


def test_layer_sends_each_layer_when_it_is_computed():
    first = [(layer, 5, [Batch(layer, 1, 0, 4)]) for layer in range(3)]
    assert replay(LAYER) == first + [(layer, 10, [Batch(layer, 1, 4, 10)]) for layer in range(3)]


def test_small_layers_travel_together_but_the_last_ones_do_not_wait():
    first = [(1, 5, [Batch(0, 2, 0, 4)]), (2, 5, [Batch(2, 1, 0, 4)])]
    assert replay(LAYER, min_layers=2) == [*first, (1, 10, [Batch(0, 2, 4, 10)]), (2, 10, [Batch(2, 1, 4, 10)])]


def test_what_is_computed_already_leaves_at_once_and_only_once():
    divider = Divider(LAYER, range(3), range(10), 4)
    assert divider.computed(2, 10) == [Batch(0, 3, 0, 10)]
    assert divider.computed(2, 10) == [] and divider.complete


def test_a_transfer_is_complete_when_its_last_layer_is():
    divider = Divider(LAYER, range(3), range(10), 4)
    for layer in range(3):
        assert not divider.complete
        divider.computed(layer, 10)
    assert divider.complete


def test_a_chunk_that_completes_no_unit_sends_nothing():
    assert Divider(CHUNK, range(3), range(10), 8).computed(2, 7) == []


@pytest.mark.parametrize("tokens, expected", [(0, FULL), (511, FULL), (512, CHUNK), (4096, CHUNK), (4097, LAYER)])
def test_auto_chooses_by_the_length_of_the_prompt(tokens, expected):
    assert Bounds().choose(tokens) is expected


def test_bounds_and_the_choice_itself_can_be_configured():
    assert [Bounds(2, 3).choose(tokens) for tokens in (1, 2, 3, 4)] == [FULL, CHUNK, CHUNK, LAYER]
    assert Bounds(fixed=LAYER).choose(1) is LAYER


@pytest.mark.parametrize("chunk, layer", [(-1, 4), (5, 4)])
def test_impossible_bounds_are_refused(chunk, layer):
    with pytest.raises(TransferError, match="granularity bounds"):
        Bounds(chunk, layer)
