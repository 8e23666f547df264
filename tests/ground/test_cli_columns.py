"""Tables for terminals of any width: nothing is cut, and what does not fit side by side is stacked."""

import pytest

from mooncake_connector.cli.columns import pairs, sheet

HEADINGS = ("id", "model", "size>")
ROWS = [("3486f3d9", "org/[mooncake]-large", "896.0 KiB"), ("a6aaa646", "模型", "1.0 GiB")]


def test_columns_are_aligned_where_they_fit():
    assert sheet("Namespaces", HEADINGS, ROWS, width=80) == [
        "Namespaces",
        "id        model                      size",
        "3486f3d9  org/[mooncake]-large  896.0 KiB",
        "a6aaa646  模型                    1.0 GiB",
    ]


def test_a_pipe_has_no_width():
    assert sheet("", HEADINGS, [("x" * 500, "y", "z")], width=None)[1].startswith("x" * 500)


def test_a_terminal_that_is_too_narrow_has_one_value_a_line():
    assert sheet("", HEADINGS, ROWS[:1], width=30) == [
        "id: 3486f3d9",
        "  model: org/[mooncake]-large",
        "  size: 896.0 KiB",
    ]


def test_a_column_that_may_be_folded_is_before_all_are_stacked():
    assert sheet("", ("id", "model~", "size>"), ROWS[:1], width=36) == [
        "id       model                  size",
        "3486f3d9 org/[mooncake]-la 896.0 KiB",
        "         rge",
    ]


@pytest.mark.parametrize("width", [10, 40, 80, 200, None])
def test_no_width_cuts_a_value(width):
    text = "\n".join(sheet("t", HEADINGS, ROWS, width=width))
    assert [value for row in ROWS for value in row if value not in text] == []


def test_pairs_are_folded_between_words_where_they_do_not_fit():
    rows = [("used", "2.6 MiB of 64.0 MiB (4.1%)"), ("taken back from dead writers", "0 B")]
    assert pairs("Pool", rows, width=80) == [
        "Pool",
        "used                          2.6 MiB of 64.0 MiB (4.1%)",
        "taken back from dead writers  0 B",
    ]
    assert pairs("", rows, width=30) == [
        "used: 2.6 MiB of 64.0 MiB",
        "  (4.1%)",
        "taken back from dead writers:",
        "  0 B",
    ]


def test_what_would_steer_a_terminal_is_shown_and_not_obeyed():
    (_, line) = sheet("", ("model",), [("\x1b[31mred\nnext\u202e",)], width=None)
    assert line == r"\x1b[31mred\nnext\u202e"
