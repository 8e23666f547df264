"""`bench device` runs here, in sizes that show nothing but that: every figure is there, and the bytes are right."""

import json
import subprocess
import sys

import pytest
from gpu.device import STAND_IN, require

require()
for needed in ("torch", "triton"):
    pytest.importorskip(needed)
pytestmark = pytest.mark.gpu

DEADLINE_S = 600


@pytest.mark.skipif(STAND_IN, reason="tests/vllm/test_device_bench.py runs it over a stand-in")
def test_a_quick_run(capsys):
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "device", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 3 * 10 and all(row["value"] > 0 or "page-locked" in row["figure"] for row in rows)
    with capsys.disabled():
        for row in rows:
            print("\n{figure}: {value:.4g} {unit}, limit {limit}".format(**row), end="")
