"""What a benchmark reports: goals, rows, one report; as JSON and as a table for people.

Every ``mooncake-connector bench`` command uses this form. It knows nothing of how a figure was measured.
"""

from __future__ import annotations

import msgspec

from mooncake_connector.cli.columns import sheet


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that a figure has to keep, all of them; ratios are ``value / limit`` and ``value / peer``."""

    at_least: float | None = None
    at_most: float | None = None
    at_least_of_limit: float | None = None
    at_least_of_peer: float | None = None
    at_most_of_peer: float | None = None

    def text(self, unit: str) -> str:
        """The goal in words, for example ``>= 0.45 of limit, >= 4 times peer``."""
        parts = []
        if self.at_least is not None:
            parts.append(f">= {self.at_least:g} {unit}")
        if self.at_most is not None:
            parts.append(f"<= {self.at_most:g} {unit}")
        if self.at_least_of_limit is not None:
            parts.append(f">= {self.at_least_of_limit:g} of limit")
        if self.at_least_of_peer is not None:
            parts.append(f">= {self.at_least_of_peer:g} times peer")
        if self.at_most_of_peer is not None:
            parts.append(f"<= {self.at_most_of_peer:g} of peer")
        return ", ".join(parts)

    def judge(self, value: float | None, limit: float | None, peer: float | None) -> bool | None:
        """False if a bound that could be checked is broken, None if one could not be checked, else True."""
        verdicts = [
            _compare(value, self.at_least, None, above=True),
            _compare(value, self.at_most, None, above=False),
            _compare(value, self.at_least_of_limit, limit, above=True, relative=True),
            _compare(value, self.at_least_of_peer, peer, above=True, relative=True),
            _compare(value, self.at_most_of_peer, peer, above=False, relative=True),
        ]
        asked = [verdict for verdict in verdicts if verdict != "not asked"]
        if "broken" in asked:
            return False
        return None if "not measured" in asked else True


def _compare(
    value: float | None, bound: float | None, base: float | None, *, above: bool, relative: bool = False
) -> str:
    if bound is None:
        return "not asked"
    if value is None or (relative and base is None):
        return "not measured"
    threshold = bound * base if relative and base is not None else bound
    kept = value >= threshold if above else value <= threshold
    return "kept" if kept else "broken"


class Row(msgspec.Struct, frozen=True):
    """One figure. ``limit`` (this machine's own) and ``peer`` are in the row's unit, None where there is none.

    ``ok`` is None where there is no goal, or where a part of the goal could not be measured in this run.
    """

    figure: str
    value: float | None
    unit: str
    limit: float | None = None
    peer: float | None = None
    goal: str | None = None
    ok: bool | None = None


def row(
    figure: str,
    value: float | None,
    unit: str,
    *,
    limit: float | None = None,
    peer: float | None = None,
    goal: Goal | None = None,
) -> Row:
    """A `Row`, judged against its goal."""
    text = goal.text(unit) if goal else None
    ok = goal.judge(value, limit, peer) if goal else None
    return Row(figure, value, unit, limit, peer, text, ok)


class Report(msgspec.Struct, frozen=True):
    """One run of a benchmark; the whole of what ``--json`` prints."""

    machine: dict[str, str | int | float | None]
    versions: dict[str, str | None]
    rows: list[Row]

    def to_json(self) -> str:
        """One JSON object on one line: ``machine``, ``versions`` and ``rows``."""
        return msgspec.json.encode(self).decode()

    def without_verdicts(self) -> Report:
        """The same figures, held against nothing: for sizes so small that they say nothing about a goal."""
        rows = [msgspec.structs.replace(item, goal=None, ok=None) for item in self.rows]
        return msgspec.structs.replace(self, rows=rows)

    def to_lines(self, title: str, width: int | None) -> list[str]:
        """The rows for people, with the ratios to limit and peer, and the goals where there are any."""
        headings = ["figure~", "value>", "unit", "limit>", "of limit>", "peer>", "of peer>", "goal", "ok"]
        used = len(headings) if any(item.goal for item in self.rows) else headings.index("goal")
        rows = [
            (
                item.figure,
                _number(item.value),
                item.unit,
                _number(item.limit),
                _ratio(item.value, item.limit),
                _number(item.peer),
                _ratio(item.value, item.peer),
                item.goal or "",
                {True: "yes", False: "NO", None: "?" if item.goal else ""}[item.ok],
            )[:used]
            for item in self.rows
        ]
        return sheet(title, headings[:used], rows, width)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None or base <= 0 else f"{value / base:.3g}x"
