"""Writes docs/images/top.svg: `mooncake-connector top` beside real engines on a pool with tiers, as rich draws it.

`MOONCAKE_TEST_LONG=1 PYTHONPATH=tests .venvs/vllm/bin/python tests/tools/record_top.py MODEL docs/images/top.svg`, with
the folder of a small model, takes about two minutes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from e2e.monitored import Seen, monitored
from mooncake_connector.cli.top.figures import Figures, Shown
from mooncake_connector.cli.top.screen import Screen
from mooncake_connector.cli.top.sources import Sources

WIDTH, RECORDED_S, MOST_S, INTERVAL_S = 100, 60.0, 150.0, 2.0


def record(seen: Seen, to: Path) -> None:
    sources = Sources(seen.pool, seen.urls, INTERVAL_S)
    figures, start_s = Figures(sources), time.monotonic()
    while time.monotonic() - start_s < RECORDED_S or not is_busy(figures.now()):
        if time.monotonic() - start_s > MOST_S:
            raise SystemExit("not everything that is shown happened at once in that time")
        seen.check()
        figures.now()
        time.sleep(INTERVAL_S / 5)
    shown = without_folders(figures.now())
    sources.close()
    console = Console(width=WIDTH, record=True, file=StringIO(), force_terminal=True, highlight=False)
    for line in Screen(WIDTH).lines(shown):
        console.print(line, soft_wrap=True)
    to.write_text(console.export_svg(title="mooncake-connector top", unique_id="top"), "utf-8")


def without_folders(shown: Shown) -> Shown:
    """Commands as from the folder of the environments, without this machine's paths."""
    users = []
    for user in shown.users or ():
        command = re.sub(r"\S*/(\.venvs?/|tests/)", r"\1", user.command)
        users.append(dataclasses.replace(user, command=command))
    return dataclasses.replace(shown, users=users)


def is_busy(shown: Shown) -> bool:
    """Whether there is a figure in every part."""
    return (
        bool(shown.hit_share)
        and shown.rates["evicted_pages"] > 0
        and any(now > 0 for now, _ in shown.transports.values())
        and any(tier.fetched_nbytes_s > 0 for tier in shown.tiers)
        and sum(engine.load_nbytes_s > 0 for engine in shown.engines) > 1
    )


def main() -> None:
    model, to = (Path(given).absolute() for given in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, monitored(model, Path(folder), Path(folder)) as seen:
        record(seen, to)


if __name__ == "__main__":
    main()
