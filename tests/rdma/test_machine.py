"""Starts the emulated machine, and runs in it what is marked `inside`."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rdma.image import Missing
from rdma.machine import VARIABLE, kept, run

WANTED = "MOONCAKE_TEST_RDMA"
LEAST = 40
"""Tests that must have run there."""

pytestmark = [
    pytest.mark.skipif(VARIABLE in os.environ, reason="this is the emulated machine"),
    pytest.mark.skipif(
        os.environ.get(WANTED) != "1",
        reason=f"THE TRANSPORT rdma IS NOT TESTED: that takes an emulated machine; {WANTED}=1, or `make test-rdma`",
    ),
]


def test_the_transport_passes_in_a_machine_with_cards(tmp_path: Path) -> None:
    pytest_here = str(Path(sys.executable).with_name("pytest"))
    options = ["-v", "-p", "no:cacheprovider", "--junit-xml=/out/report.xml", "-m", "inside and not slow"]
    try:
        status = run([pytest_here, *options, "tests/rdma"], tmp_path, kept())
    except Missing as error:
        pytest.skip(f"no emulated machine: {error}")
    report = tmp_path / "report.xml"
    assert report.exists(), f"the machine ended with status {status} before the tests did"
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    assert status == 0, "the tests that failed are shown above"
    assert sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites) >= LEAST
