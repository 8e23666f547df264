"""Comparisons as rows: goals, and figures beside the machine's limits and other projects; as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mooncake_connector.cli.bench.report import Report, number, ratio
from mooncake_connector.cli.columns import sheet


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Bounds that a figure has to keep, all of them; ratios are ``value / limit`` and ``value / peer``."""

    at_least: float | None = None
    at_most: float | None = None
    at_least_of_limit: float | None = None
    at_least_of_peer: float | None = None
    at_most_of_peer: float | None = None

    def text(self, unit: str) -> str:
        """The goal in words, for example ``>= 0.45 of limit, >= 4 times peer``."""
        forms = {
            "at_least": f">= {{:g}} {unit}",
            "at_most": f"<= {{:g}} {unit}",
            "at_least_of_limit": ">= {:g} of limit",
            "at_least_of_peer": ">= {:g} times peer",
            "at_most_of_peer": "<= {:g} of peer",
        }
        return ", ".join(forms[name].format(bound) for name, bound in asdict(self).items() if bound is not None)

    def judge(self, value: float | None, limit: float | None, peer: float | None) -> bool | None:
        """False if a bound that could be checked is broken, None if one could not be checked, else True."""
        bases = {"at_least": 1.0, "at_most": 1.0, "at_least_of_limit": limit}
        verdicts = []
        for name, bound in asdict(self).items():
            if bound is not None:
                base = bases.get(name, peer)
                if value is None or base is None:
                    verdicts.append(None)
                else:
                    verdicts.append(value >= bound * base if name.startswith("at_least") else value <= bound * base)
        return False if False in verdicts else None if None in verdicts else True


@dataclass(frozen=True)
class Row:
    """One figure. `limit` and `peer` are in the row's unit; `ok` is None where there is no goal or no way to tell."""

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
    return Row(figure, value, unit, limit, peer, text, goal.judge(value, limit, peer) if goal else None)


def best_between(
    peer: Mapping[str, Mapping[str, Any]], settings: tuple[str, ...], figure: Any, best: Callable[..., Any] = min
) -> Any:
    """The better of a peer's settings; None where none was measured."""
    return best((peer[name][figure] for name in settings if figure in peer.get(name, {})), default=None)


@dataclass(frozen=True)
class Comparison:
    """One run; the whole of what ``--json`` writes."""

    machine: dict[str, Any]
    versions: dict[str, str | None]
    rows: list[Row]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def without_verdicts(self) -> Comparison:
        """The same figures, held against nothing: for sizes so small that they say nothing about a goal."""
        return replace(self, rows=[replace(item, goal=None, ok=None) for item in self.rows])

    def to_lines(self, title: str, width: int | None) -> list[str]:
        headings = ["figure~", "value>", "unit", "limit>", "of limit>", "peer>", "of peer>", "goal", "ok"]
        used = len(headings) if any(item.goal for item in self.rows) else headings.index("goal")
        cells = [
            (
                *(item.figure, number(item.value), item.unit, number(item.limit), ratio(item.value, item.limit)),
                *(number(item.peer), ratio(item.value, item.peer), item.goal or ""),
                {True: "yes", False: "NO", None: "?" if item.goal else ""}[item.ok],
            )[:used]
            for item in self.rows
        ]
        return sheet(title, headings[:used], cells, width)


def judged(report: Report, goals: Mapping[str, Goal], peers: Mapping[str, float | None]) -> list[Row]:
    """The rows of a report with goals and peers, each by the beginning of its figure."""

    def of(found: Mapping[str, Any], figure: str) -> Any:
        return next((value for beginning, value in found.items() if figure.startswith(beginning)), None)

    return [
        row(
            item.figure,
            item.value,
            item.unit,
            limit=item.limit,
            peer=of(peers, item.figure),
            goal=of(goals, item.figure),
        )
        for item in report.rows
    ]
