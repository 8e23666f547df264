"""The figures of hybrid models in docs/benchmarks.md are those of the arithmetic, and the arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.hybrid_bytes import PUBLISHED, TINY, Model, attention, delta_rule, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
TOKEN_NBYTES = 2 * 4 * 64 * 2


def test_full_attention_is_stored_whole_and_a_window_only_before_the_end() -> None:
    model = Model("mixed", 128, (attention(2, 4, 64, window=128), attention(3, 4, 64)))
    assert model.stored(1_300) == TOKEN_NBYTES * (2 * 128 + 3 * 1_280)
    assert model.everything(1_300) == TOKEN_NBYTES * 5 * 1_280


def test_a_prompt_shorter_than_its_window_is_stored_whole() -> None:
    model = Model("wide", 16, (attention(2, 4, 64, window=1024),))
    assert model.stored(500) == model.everything(500) == TOKEN_NBYTES * 2 * 496


@pytest.mark.parametrize(("tokens", "states"), [(256, 0), (257, 1), (10_000, 1)])
def test_a_prompt_has_one_state_where_it_can_be_hit_at_all(tokens: int, states: int) -> None:
    """vLLM computes a prompt's last token in any case, so one block alone is never hit."""
    model = Model("states", 256, (delta_rule(3, 4, 8, 64, 4),))
    assert model.stored(tokens) == states * 3 * (3 * 1024 * 2 + 8 * 64 * 64 * 4)
    assert model.everything(tokens) == tokens // 256 * 3 * 137_216


def test_the_docs_show_these_figures() -> None:
    text = DOCS.read_text()
    assert table(TINY) in text
    assert table(PUBLISHED) in text
