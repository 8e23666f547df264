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
    assert model.stored(1_280) == TOKEN_NBYTES * (2 * 256 + 3 * 1_280), "a prompt that goes on has a hit of all of it"
    assert model.everything(1_300) == TOKEN_NBYTES * 5 * 1_280


def test_a_prompt_shorter_than_its_window_is_stored_whole() -> None:
    model = Model("wide", 16, (attention(2, 4, 64, window=1024),), page_tokens=16)
    assert model.stored(500) == model.everything(500) == TOKEN_NBYTES * 2 * 496


def test_hits_end_where_pages_and_blocks_do() -> None:
    model = Model("small blocks", 16, (attention(1, 4, 64, window=20), attention(1, 4, 64)))
    assert model.unit_tokens == 64
    assert model.stored(1_000) == TOKEN_NBYTES * (64 + 960)


@pytest.mark.parametrize(("tokens", "states"), [(256, 0), (257, 1), (10_000, 1)])
def test_a_prompt_has_one_state_where_it_can_be_hit_at_all(tokens: int, states: int) -> None:
    """vLLM computes a prompt's last token in any case, so one block alone is never hit."""
    model = Model("states", 256, (delta_rule(3, 4, 8, 64, 4), attention(1, 4, 64)))
    pages_nbytes = tokens // 64 * 64 * TOKEN_NBYTES
    assert model.stored(tokens) == pages_nbytes + states * 3 * (3 * 1024 * 2 + 8 * 64 * 64 * 4)
    assert model.everything(tokens) == pages_nbytes + tokens // 256 * 3 * 137_216


def test_a_state_is_stored_once_the_pages_before_it_are_worth_it() -> None:
    model = Model("states", 256, (delta_rule(3, 4, 8, 64, 4), attention(1, 4, 64)))
    spacing = model.spacing_tokens(0.5)
    assert spacing == 3 * 137_216 * 2 // TOKEN_NBYTES == 804
    for tokens, states in ((1_024, 0), (1_025, 1)):
        assert model.stored(tokens, 0.5) == TOKEN_NBYTES * 1_024 + states * 3 * 137_216


def test_the_published_qwen_has_the_pages_that_fit_its_blocks() -> None:
    (qwen,) = (model for model in PUBLISHED if model.name.startswith("Qwen"))
    assert qwen.unit_tokens == qwen.block_tokens and 16 <= qwen.page_tokens <= 64


def test_the_docs_show_these_figures() -> None:
    text = DOCS.read_text()
    assert table(TINY) in text
    assert table(PUBLISHED) in text
