"""Tables as lines of text: nothing is cut, and what does not fit side by side in a terminal is stacked."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

from mooncake_connector.log import printable

_FOLDED_COLUMNS = 12
"""A column that may be folded is not made narrower than this."""


def sheet(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Rows under headings, or one "heading: value" a line where `width` is too small for them. None: as wide as needed.

    A heading that ends in ">" has its column aligned to the right; one that ends in "~" may be folded.
    """
    names = [heading.rstrip(">~") for heading in headings]
    shown = [[clean(value) for value in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(names, *shown, strict=True)]
    lines = [title] if title else []
    right = [heading.endswith(">") for heading in headings]
    width = width if width is not None else sys.maxsize
    for gap in (2, 1):
        needed = sum(widths) + gap * (len(widths) - 1)
        if needed <= width:
            return lines + [_side_by_side(row, widths, right, gap) for row in (names, *shown)]
    excess = needed - width
    at = next((index for index, heading in enumerate(headings) if heading.endswith("~")), None)
    if at is not None and widths[at] - excess >= max(_FOLDED_COLUMNS, cell_len(names[at])):
        widths[at] -= excess
        return lines + [line for row in (names, *shown) for line in _with_folded(row, at, widths, right)]
    for row in shown:
        for index, (name, value) in enumerate(zip(names, row, strict=True)):
            lines += folded(f"{name}: {value}", width, "  " if index else "", "  ")
    return lines


def pairs(title: str, rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Names with their values beside them, or folded below one another where `width` is too small."""
    shown = [(name, clean(value)) for name, value in rows]
    column = max(cell_len(name) for name, _ in rows)
    lines = [title] if title else []
    if width is None or column + 2 + max(cell_len(value) for _, value in shown) <= width:
        return lines + [_side_by_side(row, [column, 0], [False, False], 2) for row in shown]
    return lines + [line for name, value in shown for line in folded(f"{name}: {value}", width, more="  ")]


def clean(text: str) -> str:
    """`text` with what would steer a terminal (escapes, line ends) written out."""
    return printable(text, len(text))


def _side_by_side(row: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: int) -> str:
    cells = []
    for value, width, to_the_right in zip(row, widths, right, strict=True):
        blanks = " " * (width - cell_len(value))
        cells.append(blanks + value if to_the_right else value + blanks)
    return (" " * gap).join(cells).rstrip()


def _with_folded(row: Sequence[str], at: int, widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    first, *more = chop_cells(row[at], widths[at]) or [""]
    below = [["" if index != at else part for index in range(len(row))] for part in more]
    return [_side_by_side(cells, widths, right, 1) for cells in ([*row[:at], first, *row[at + 1 :]], *below)]


def folded(text: str, width: int, indent: str = "", more: str = "") -> list[str]:
    """`text` in lines that begin with `indent`, all but the first with `more` as well.

    Words stay whole, so that a path can be copied.
    """
    return textwrap.wrap(
        clean(text), max(width, 20), initial_indent=indent, subsequent_indent=indent + more,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
