"""The demos are the product's promise on real weights and a real text; they are run as a person runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from long_form import LONG

HERE = Path(__file__).resolve().parent


def last_line(name: str) -> str:
    """What a demo ends with, which has to succeed."""
    demo = subprocess.run(
        [sys.executable, str(HERE / f"{name.replace('-', '_')}.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    print(demo.stdout)
    assert demo.returncode == 0
    return demo.stdout.rstrip().splitlines()[-1]


IN_LONG_FORM = pytest.mark.skipif(not LONG, reason="it has a long form alone; test_engines.py shows the same")


@pytest.mark.parametrize("name", ["demo", pytest.param("demo-engines", marks=[pytest.mark.long, IN_LONG_FORM])])
def test_demo_ends_with_a_hit_and_the_same_text(name: str) -> None:
    last = last_line(name)
    number = r"\d+\.\d{3}"
    match = re.fullmatch(rf"{name}: OK hit_tokens=(\d+) ttft_cold_s={number} ttft_warm_s={number} same_text=yes", last)
    assert match, last
    assert int(match[1]) >= 1500


def test_one_file_brings_up_prefill_decode_and_router() -> None:
    last = last_line("demo-pd")
    match = re.fullmatch(r"demo-pd: OK fetched_tokens=(\d+)", last)
    assert match, last
    assert int(match[1]) >= 500
