"""The dashboard's panels as a person sees them: drawn by Grafana's own components in a headless browser.

No Grafana server can be had from the package registries that the tests install from; its components can.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["drawn", "has_data", "needs_browser"]

BUNDLE = Path(__file__).resolve().parents[2] / ".cache" / "panels"
"""Where `make setup` puts the page's script and style."""
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium"))), None)
DRAWING_S = 240.0
WIDTH, LINE, MARGIN = 1208, 36, 8
needs_browser = pytest.mark.skipif(
    BROWSER is None or not (BUNDLE / "page.js").exists(),
    reason="NOT TESTED: needs chromium-headless-shell and .cache/panels; `make setup` says why they are missing",
)


def drawn(
    dashboard: Mapping[str, Any], answers: Mapping[int, Sequence[Any]], start_s: float, end_s: float, picture: Path
) -> dict[int, str]:
    """Draw all panels into a PNG file.

    Args:
        answers: of each panel by its id, for each query `refId`, `legend` and `result` as Prometheus gave it.

    Returns:
        Of each panel by its id the HTML that it was drawn with.
    """
    page = picture.with_suffix(".html")
    data = {"dashboard": dashboard, "answers": answers, "startS": start_s, "endS": end_s}
    script = json.dumps(data).replace("</", "<\\/")
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="file://{BUNDLE}/page.css"><body>'
        f'<script>window.INPUT = {script}</script><script src="file://{BUNDLE}/page.js"></script>'
    )
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    html = browse(page, f"--window-size={WIDTH},{lines * LINE + MARGIN}", f"--screenshot={picture}", "--dump-dom")
    parts = re.split(r'id="panel-(\d+)"', html[html.rindex("</script>") :])
    return {int(number): part for number, part in zip(parts[1::2], parts[2::2], strict=True)}


def has_data(html: str) -> bool:
    """Whether a panel shows a curve or a number."""
    return "<canvas" in html or bool(re.search(r">\s*-?\d[\d.]*", html))


def browse(page: Path, *arguments: str) -> str:
    """What the browser prints of a page once that has been drawn."""
    assert BROWSER is not None
    alone = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={page.parent}/browser")
    command = [BROWSER, "--headless", *alone, "--virtual-time-budget=10000", *arguments, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DRAWING_S).stdout
