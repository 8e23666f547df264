"""Starts the emulated machine, and runs in it what is marked `inside`: some of it, or with MOONCAKE_TEST_RDMA=1 all."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rdma import image
from rdma.image import Missing
from rdma.machine import VARIABLE, kept, run

ALL = os.environ.get("MOONCAKE_TEST_RDMA") == "1"
SHORT = (
    "test_inside.py::TestRdma::test_scattered_pieces_of_all_sizes_arrive_and_nothing_else_changes",
    "test_inside.py::TestRdma::test_no_byte_changes_once_revoke_returned",
    "test_inside_failures.py::TestRefusals",
    "test_inside_failures.py::TestLimits",
    "test_inside_kills.py::TestKills::test_receivers_killed_at_any_moment_are_lost_and_the_next_one_gets_everything",
    "test_inside_rails.py::TestRails::test_a_rail_that_fails_leaves_its_share_to_the_other_and_is_taken_back",
    "test_inside_storms.py",
    "test_inside_verbs.py",
    "test_inside_windows.py",
    "test_inside_wire.py::TestBadWire",  # last: its cards stay
)
"""For `make test`: four minutes of a core."""
LEAST = 110 if ALL else 50
"""Tests that must have run there."""

pytestmark = pytest.mark.skipif(VARIABLE in os.environ, reason="this is the emulated machine")


def test_the_transport_passes_in_a_machine_with_cards(tmp_path: Path) -> None:
    where = ["tests/rdma"] if ALL else [f"tests/rdma/{name}" for name in SHORT]
    pytest_here = str(Path(sys.executable).with_name("pytest"))
    # What the tests of the whole folder share takes the emulated processor long to import.
    options = ["-v", "-p", "no:cacheprovider", "--confcutdir=tests/rdma", "--junit-xml=/out/report.xml"]
    options += ["-m", "inside and not slow"]
    variables = {**kept(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        status = run([pytest_here, *options, *where], tmp_path, variables)
    except Missing as error:
        pytest.skip(f"THE TRANSPORT rdma IS NOT TESTED: no emulated machine: {error}")
    report = tmp_path / "report.xml"
    assert report.exists(), f"the machine ended with status {status} before the tests did"
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    assert status == 0, "the tests that failed are shown above"
    assert sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites) >= LEAST


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("apt-get", "#!/bin/sh\necho broken >&2\nexit 100\n"),
        ("apt-get", "#!/bin/sh\nfor p; do :; done\necho half of it > linux-image.deb\n"),
        ("apt-cache", "#!/bin/sh\nexit 0\n"),
        ("dpkg-deb", "#!/bin/sh\necho not a package >&2\nexit 2\n"),
    ],
    ids=["no download", "half a download", "no such package", "a broken package"],
)
def test_packages_that_cannot_be_had_are_said_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, text: str
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in image.PROGRAMS:
        (programs / name).write_text("#!/bin/sh\n")
    (programs / "apt-cache").write_text("#!/bin/sh\necho '  Depends: linux-image-6.1'\n")
    (programs / "apt-get").write_text("#!/bin/sh\n: > linux-image-6.1.deb\n")
    (programs / program).write_text(text)
    for path in programs.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(Missing, match=r"Debian's packages cannot be had or used|apt knows no linux-image-amd64"):
        image.made(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_program_that_is_missing_is_said_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="it needs qemu-system-x86 and busybox-static and iproute2: as root, apt-get"):
        image.made(tmp_path)
