"""Every reason for a miss has words, and every cause of the store has a reason."""

from pathlib import Path

import pytest

from mooncake_connector.misses import Miss


@pytest.mark.parametrize("miss", Miss)
def test_each_reason_says_what_it_is_and_what_to_do(miss: Miss) -> None:
    assert miss.value == miss.name.lower()  # the word in metrics, which dashboards rely on
    assert miss.words.said and miss.words.do
    assert not miss.words.said.endswith(".") and not miss.words.do.endswith(".")


def test_no_two_reasons_say_the_same() -> None:
    assert len({miss.words.said for miss in Miss}) == len(Miss)


@pytest.mark.parametrize(
    ("cause", "miss"),
    [("pressure", Miss.EVICTED), ("cleared", Miss.CLEARED), ("corrupt", Miss.DAMAGED), ("no_space", Miss.REFUSED)],
)
def test_the_store_s_causes_have_a_reason(cause: str, miss: Miss) -> None:
    assert Miss.of_cause(cause) is miss


def test_the_page_says_what_the_words_say() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")
    for miss in Miss:
        assert f"| `{miss.value}` | {miss.words.said} | {miss.words.do} |" in page
