"""What `top` shows, as lines of a terminal: none is wider than it is, and colour says nothing that words do not."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from mooncake_connector.cli.columns import clean, folded
from mooncake_connector.cli.output import human_seconds
from mooncake_connector.cli.tables import place_of, tier_state
from mooncake_connector.cli.top.figures import Engine, Shown, Tier
from mooncake_connector.sizes import human_nbytes
from store_client.base import StoreStats
from store_client.embedded import PoolUser

_LABEL = 10
_MOST_SPARKS, _MOST_BAR = 60, 40
_LEAST_CUT = 8
"""A column that is cut is not made narrower than this."""

_ENGINES = ("engine", "hit rate>", "load>", "save>", "run>", "wait>", "prefill saved>", "from pool>", "failed>")
_TIERS = ("tier", "state", "fetched>", "hit rate>", "written>", "used>", "queued>", "failed>")

Rows = Sequence[Sequence[str]]


def draws_bars(encoding: str | None) -> bool:
    """Whether a terminal's encoding has what bars are drawn with."""
    try:
        "▁█░…".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Screen:
    """Lines for a terminal of `width` columns; `bars` as `draws_bars` says."""

    def __init__(self, width: int, *, bars: bool = True) -> None:
        self._width = width
        self._sparks = "▁▂▃▄▅▆▇█" if bars else "_.-=+*%#"
        self._full, self._empty, self._more = ("█", "░", "…") if bars else ("#", "-", "~")

    def lines(self, shown: Shown) -> list[Text]:
        """All of it, what matters most first: who has fewer lines shows the first ones."""
        parts = [self._head(shown)]
        if shown.stats is not None:
            parts.append(self._pool(shown, shown.stats))
        elif shown.pool is not None or shown.cause:
            parts.append(self._row("no pool", self._folded(shown.cause or "not read yet"), "bold red"))
            if shown.pool is not None and shown.cause:
                parts.append(self._row("", [f"for {human_seconds(shown.gone_s)}; looked for again and again"]))
        if shown.engines:
            parts.append(self._table("Engines", _ENGINES, [_engine_row(one) for one in shown.engines]))
        if shown.transports:
            sent = [(name, _bytes_s(now), human_nbytes(int(total))) for name, (now, total) in shown.transports.items()]
            parts.append(self._table("Transfers to other instances", ("transport", "now>", "in all>"), sent))
        if shown.tiers:
            parts.append(self._table("Tiers", _TIERS, [_tier_row(one) for one in shown.tiers]))
        elif shown.agent_cause:
            parts.append(self._row("tiers", self._folded(shown.agent_cause)))
        if shown.users is not None and shown.stats is not None:
            title = f"Processes: {len(shown.users)}" if shown.users else "No process has the pool open"
            parts.append(self._table(title, ("process", "for>", "command"), [_user_row(user) for user in shown.users]))
        found: list[Text] = []
        for part in parts:
            found += [*([Text()] if found and len(part) > 1 else []), *part]
        return found

    def line(self, shown: Shown) -> str:
        """All of it in one line, for who keeps them: not cut."""
        rates = shown.rates
        pool = [f"no pool: {clean(shown.cause)}"] if shown.stats is None else [
            f"hit {_share(shown.hit_share)}",
            f"{_number(rates.get('hit_tokens', 0))} tokens/s",
            f"read {_bytes_s(rates.get('read_nbytes', 0))}",
            f"stored {_bytes_s(rates.get('stored_nbytes', 0))}",
            f"fill {_share(_fill(shown.stats))}",
            f"evicted {_number(rates.get('evicted_pages', 0))}/s",
        ]  # fmt: skip
        engines = [f"{clean(one.url)} {clean(one.cause) or _engine_words(one)}" for one in shown.engines]
        return "  ".join([_clock(shown), *pool, *engines])

    def _head(self, shown: Shown) -> list[Text]:
        right = f"{_clock(shown)}, of {shown.span_s:.1f} s" if shown.span_s else _clock(shown)
        left = f"mooncake-connector  {clean(shown.pool or '')}".rstrip()
        room = self._width - cell_len(right) - 2
        return [Text.assemble((self._fitted(left, max(room, 0)), "bold"), "  ", right)]

    def _pool(self, shown: Shown, stats: StoreStats) -> list[Text]:
        rates, sparks = shown.rates, self._sparkline(shown.hit_shares)
        counted = stats.hit_tokens + stats.missed_tokens
        overall = f"{_share(stats.hit_tokens / counted if counted else None)} since the pool was made"
        lines = self._row("hit rate", [*([sparks] if sparks else []), f"{_share(shown.hit_share)} now", overall])
        lines += self._row("tokens", [
            f"hit {_number(rates.get('hit_tokens', 0))}/s", f"missed {_number(rates.get('missed_tokens', 0))}/s",
            f"{_number(stats.hit_tokens)} hit in all",
        ])  # fmt: skip
        lines += self._row("read", [
            _bytes_s(rates.get("read_nbytes", 0)), f"{_number(rates.get('read_pages', 0))} pages/s",
        ])  # fmt: skip
        lines += self._row("stored", [
            _bytes_s(rates.get("stored_nbytes", 0)), f"{_number(rates.get('stored_pages', 0))} pages/s",
            f"{_number(rates.get('present_pages', 0))}/s already there",
        ])  # fmt: skip
        used, capacity = human_nbytes(stats.used_nbytes), human_nbytes(stats.capacity_nbytes)
        lines += self._row("fill", [
            self._bar(_fill(stats)), f"{_share(_fill(stats))}, {used} of {capacity}", f"{stats.pages:,} pages",
        ])  # fmt: skip
        lines += self._row("evicted", [
            f"{_number(rates.get('evicted_pages', 0))} pages/s", *_age(shown.evicted_within_s),
            f"{_number(stats.evicted_pages)} in all",
        ])  # fmt: skip
        failures = [f"{clean(cause)} {count:,}" for cause, count in sorted(stats.failures.items()) if count]
        failures += [f"corrupt pages {stats.corrupt_pages:,}"] if stats.corrupt_pages else []
        return lines + (self._row("failures", failures, "red") if failures else [])

    def _row(self, label: str, values: Iterable[str], style: str = "") -> list[Text]:
        """A label and values beside it, in more lines where they do not fit in one."""
        room = self._width - _LABEL
        lines = [""]
        for value in values:
            value = self._fitted(clean(value), room)
            joined = f"{lines[-1]}  {value}" if lines[-1] else value
            if cell_len(joined) > room:
                lines.append(value)
            else:
                lines[-1] = joined
        labels = [label, *[""] * (len(lines) - 1)]
        return [
            Text.assemble((set_cell_size(name, _LABEL), style or "bold"), line)
            for name, line in zip(labels, lines, strict=True)
        ]

    def _folded(self, text: str) -> list[str]:
        return folded(text, self._width - _LABEL)

    def _table(self, title: str, headings: Sequence[str], rows: Rows) -> list[Text]:
        """Rows under headings. Columns that do not fit are left out from the right; the first and the last one that is
        aligned to the left may be cut before that.
        """
        lines = [Text(self._fitted(title, self._width), "bold")]
        if not rows:
            return lines
        right = [heading.endswith(">") for heading in headings]
        cells = [[heading.rstrip(">") for heading in headings], *([clean(cell) for cell in row] for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        while sum(widths) + 2 * (len(widths) - 1) > self._width:
            excess = sum(widths) + 2 * (len(widths) - 1) - self._width
            at = next((at for at in (len(widths) - 1, 0) if not right[at] and widths[at] - excess >= _LEAST_CUT), None)
            if at is not None:
                widths[at] -= excess
            elif len(widths) > 1:
                widths.pop()
            else:
                widths[0] = self._width
        for number, row in enumerate(cells):
            fitted = [self._fitted(cell, width) for cell, width in zip(row, widths, strict=False)]
            shown = [
                " " * (width - cell_len(cell)) + cell if to_the_right else set_cell_size(cell, width)
                for cell, width, to_the_right in zip(fitted, widths, right, strict=False)
            ]
            lines.append(Text("  ".join(shown).rstrip(), "" if number else "dim"))
        return lines

    def _fitted(self, text: str, width: int) -> str:
        if cell_len(text) <= width:
            return text
        return set_cell_size(text, width - 1) + self._more if width > 0 else ""

    def _sparkline(self, shares: Sequence[float | None]) -> str:
        room = max(0, min(_MOST_SPARKS, self._width - _LABEL - 12))
        last = len(self._sparks) - 1
        return "".join(" " if share is None else self._sparks[round(share * last)] for share in shares[-room:])

    def _bar(self, share: float | None) -> str:
        room = max(4, min(_MOST_BAR, self._width - _LABEL - 45))
        full = round((share or 0.0) * room)
        return self._full * full + self._empty * (room - full)


def _clock(shown: Shown) -> str:
    return time.strftime("%H:%M:%S", time.localtime(shown.unix_s))


def _fill(stats: StoreStats) -> float | None:
    return min(1.0, stats.used_nbytes / stats.capacity_nbytes) if stats.capacity_nbytes else None


def _age(within_s: float | None) -> Iterator[str]:
    if within_s is not None:
        longest = within_s == math.inf
        yield "half unused for over a week" if longest else f"half unused for {human_seconds(within_s)} or less"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _number(value: float) -> str:
    """ "0", "7.3", "12,345", "1.2 M"."""
    if value >= 1e6:
        return f"{value / 1e6:,.1f} M"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _bytes_s(nbytes: float) -> str:
    return f"{human_nbytes(int(nbytes))}/s"


def _engine_words(one: Engine) -> str:
    return _share(one.hit_share) + ("" if one.has_connector else f" {_without(one)}")


def _without(one: Engine) -> str:
    """What there is instead of a connector's figures; SGLang shows none before the pool is first asked."""
    return "no connector" if one.kind == "vLLM" else "pool not used"


def _engine_row(one: Engine) -> tuple[str, ...]:
    if one.cause:
        return (one.url.removeprefix("http://"), one.cause, *[""] * 7)
    name = re.sub(r"^http://(127\.0\.0\.1|localhost)?", "", one.url)  # in 80 columns there is room for a port
    head, asked = (f"{name} {one.kind}".rstrip(), _share(one.hit_share)), (f"{one.running:,}", f"{one.waiting:,}")
    if not one.has_connector:
        return *head, _without(one), "-", *asked, "-", "-", "-"
    return (
        *head, _bytes_s(one.load_nbytes_s), _bytes_s(one.save_nbytes_s), *asked, f"{one.saved_s_s:.1f} s/s",
        f"{_number(one.pool_tokens_s)}/s", f"{int(sum(one.failures.values())):,}",
    )  # fmt: skip


def _tier_row(one: Tier) -> tuple[str, ...]:
    report = one.report
    used, queued = report.get("used_nbytes"), report.get("queued_pages", 0)
    return (
        str(report["title"]), tier_state(report), _bytes_s(one.fetched_nbytes_s), _share(one.hit_share),
        _bytes_s(one.written_nbytes_s), "-" if used is None else human_nbytes(used), f"{queued:,}",
        f"{sum(report.get('errors', {}).values()):,}",
    )  # fmt: skip


def _user_row(user: PoolUser) -> tuple[str, ...]:
    return place_of(user), human_seconds(user.since_s), user.command or "-"

