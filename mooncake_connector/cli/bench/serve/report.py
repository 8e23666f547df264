"""The report of `bench serve`: one row for each server and state of its caches, and those that did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import msgspec

from mooncake_connector.cli.bench.serve.answer import Answer
from mooncake_connector.cli.bench.serve.load import CacheTokens, Pass, percentile
from mooncake_connector.cli.columns import sheet

NEW, SEEN = "new", "seen"
"""Prompts that nobody has computed yet, and the same prompts again."""

_NOISY = 0.25


class ServeRow(msgspec.Struct, frozen=True):
    """One server asked for one kind of prompts, all rounds together. Tokens are None where the server does not tell."""

    server: str
    prompts: str
    requests: int
    failed: int
    failure: str | None
    requests_per_second: float
    rounds: list[float]
    """Requests per second of each round."""
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tokens_computed: int | None
    tokens_engine_cache: int | None
    tokens_connector: int | None
    answers_compared: int
    answers_differ: int

    @property
    def spread(self) -> float:
        """How far apart the rounds are, as a share of the slowest."""
        return max(self.rounds) / min(self.rounds) - 1 if min(self.rounds, default=0) > 0 else 0.0


class Absent(msgspec.Struct, frozen=True):
    """A connector that did not run here, or not to the end."""

    server: str
    reason: str


class ServeReport(msgspec.Struct, frozen=True):
    """One run; the whole of what ``--json`` prints."""

    machine: dict[str, str | int | float | None]
    versions: dict[str, str | None]
    settings: dict[str, str | int | float | None]
    rows: list[ServeRow]
    absent: list[Absent]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    def warnings(self) -> list[str]:
        """What a reader of the figures has to know."""
        found = [
            f"{row.server}, {row.prompts} prompts: {row.failed} of {row.requests} requests failed: {row.failure}"
            for row in self.rows
            if row.failed
        ]
        found += [
            f"{row.server}, {row.prompts} prompts: the rounds are {row.spread:.0%} apart; something else may be running"
            for row in self.rows
            if row.spread > _NOISY
        ]
        return found

    def to_lines(self, title: str, columns: int | None) -> list[str]:
        """The rows for people, in a terminal of so many columns."""
        return sheet(title, _COLUMNS, [_cells(row) for row in self.rows], columns)

    def context_lines(self) -> list[str]:
        """What was asked, of what, and where it was asked from."""
        return [f"settings: {_listed(self.settings)}", f"machine: {_listed(self.machine)}; {_listed(self.versions)}"]

    def absent_lines(self) -> list[str]:
        return [f"not measured: {item.server}: {item.reason}" for item in self.absent]


_COLUMNS = (
    "server", "prompts", "requests/s (rounds)>", "TTFT p50>", "p90>", "p99>",
    "tokens computed>", "engine's cache>", "connector>", "failed>", "answers differ>",
)  # fmt: skip


def _cells(row: ServeRow) -> list[str]:
    return [
        row.server,
        row.prompts,
        _rate(row),
        *(_seconds(value) for value in (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)),
        *(_count(value) for value in (row.tokens_computed, row.tokens_engine_cache, row.tokens_connector)),
        str(row.failed),
        f"{row.answers_differ} of {row.answers_compared}" if row.answers_compared else "-",
    ]


def row_of(
    server: str, prompts: str, passes: Sequence[Pass], right: Sequence[Sequence[Answer | None]] | None
) -> ServeRow:
    """The passes of all rounds as one row; `right` are the answers of each round to hold them against."""
    answers = [answer for item in passes for answer in item.answers if answer is not None]
    firsts = [answer.first_token_s for answer in answers]
    counted = [item.tokens for item in passes if item.tokens is not None]
    tokens = reduce(CacheTokens.plus, counted) if counted and len(counted) == len(passes) else None
    compared, differ = compare(passes, right) if right is not None else (0, 0)
    seconds = sum(item.seconds for item in passes)
    return ServeRow(
        server=server,
        prompts=prompts,
        requests=sum(len(item.answers) for item in passes),
        failed=sum(item.failed for item in passes),
        failure=next((item.reason for item in passes if item.reason), None),
        requests_per_second=len(answers) / seconds if seconds else 0.0,
        rounds=[item.per_second for item in passes],
        ttft_p50_s=percentile(firsts, 0.5),
        ttft_p90_s=percentile(firsts, 0.9),
        ttft_p99_s=percentile(firsts, 0.99),
        tokens_computed=tokens.computed if tokens else None,
        tokens_engine_cache=tokens.engine_cache if tokens else None,
        tokens_connector=tokens.connector if tokens else None,
        answers_compared=compared,
        answers_differ=differ,
    )


def compare(passes: Sequence[Pass], right: Sequence[Sequence[Answer | None]]) -> tuple[int, int]:
    """How many answers could be compared, and how many of them differ."""
    pairs = [
        (mine, theirs)
        for item, answers in zip(passes, right, strict=False)
        for mine, theirs in zip(item.answers, answers, strict=False)
        if mine is not None and theirs is not None
    ]
    return len(pairs), sum((mine.token_ids, mine.text) != (theirs.token_ids, theirs.text) for mine, theirs in pairs)


def _listed(values: Mapping[str, str | int | float | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _rate(row: ServeRow) -> str:
    rounds = f" ({min(row.rounds):.2f}-{max(row.rounds):.2f})" if len(row.rounds) > 1 else ""
    return f"{row.requests_per_second:.2f}{rounds}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
