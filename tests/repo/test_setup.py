"""What is set up: what cannot be had is named, holds up nothing else, and is tried again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SYSTEM_PACKAGES = REPOSITORY / "tests" / "tools" / "system_packages.sh"

needs_make = pytest.mark.skipif(not shutil.which("make"), reason="NOT TESTED: needs make")

# Debian as the script sees it: a file of installed packages, an index of those that there are.
APT_GET = """
echo "$@" >>"$STATE/calls"
[[ $1 == update ]] && exit "$NO_NETWORK"
shift
for name in "$@"; do [[ $name == -* ]] || grep -qx "$name" "$STATE/index" || exit 100; done
for name in "$@"; do [[ $name == -* ]] || echo "$name" >>"$STATE/installed"; done
"""
DPKG_QUERY = """
grep -qx "${@: -1}" "$STATE/installed" && echo 'install ok installed'
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)


@pytest.fixture
def install(tmp_path: Path) -> Run:
    """Runs the script on a list of three names; `there` is what the distribution has."""
    programs = tmp_path / "programs"
    programs.mkdir()
    program(programs / "apt-get", APT_GET)
    program(programs / "dpkg-query", DPKG_QUERY)
    (tmp_path / "list.txt").write_text("# what for\none\ntwo\n\nthree\n")
    (tmp_path / "installed").write_text("one\n")

    def run(there: str, user: int = 0, no_network: int = 0) -> subprocess.CompletedProcess[str]:
        program(programs / "id", f"echo {user}\n")
        (tmp_path / "index").write_text(there.replace(" ", "\n"))
        environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "STATE": str(tmp_path),
            "NO_NETWORK": str(no_network),
        }  # fmt: skip
        return subprocess.run(
            [SYSTEM_PACKAGES, tmp_path / "list.txt"], env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def installed(tmp_path: Path) -> list[str]:
    return (tmp_path / "installed").read_text().split()


class TestSystemPackages:
    @pytest.mark.parametrize("no_network", [0, 100], ids=["", "an index that cannot be brought up to date"])
    def test_what_is_missing_is_installed_at_once(self, install, tmp_path, no_network):
        done = install("one two three", no_network=no_network)
        assert (done.returncode, done.stderr) == (0, "") and installed(tmp_path) == ["one", "two", "three"]
        assert (tmp_path / "calls").read_text().count("install -y") == 1

    def test_a_name_that_the_distribution_lacks_is_named_and_holds_up_no_other(self, install, tmp_path):
        done = install("one three")
        assert done.returncode == 0 and installed(tmp_path) == ["one", "three"]
        assert "NOT INSTALLED: two\n" in done.stderr and "As root: apt-get install two\n" in done.stderr

    def test_without_root_nothing_is_installed_and_what_is_missing_is_said(self, install, tmp_path):
        done = install("one two three", user=1000)
        assert done.returncode == 0 and installed(tmp_path) == ["one"] and not (tmp_path / "calls").exists()
        assert "NOT INSTALLED: two three\n" in done.stderr

    def test_where_nothing_is_missing_nothing_is_done(self, install, tmp_path):
        (tmp_path / "installed").write_text("one\ntwo\nthree\n")
        done = install("")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not (tmp_path / "calls").exists()


@needs_make
@pytest.mark.parametrize("stamp, says", [(".venv/.mooncake", "Mooncake"), (".venv/.s3", "S3 servers")])
def test_what_could_not_be_installed_is_said_and_tried_again(tmp_path, stamp, says):
    requirements = tmp_path / "tests" / "requirements" / f"{stamp.rpartition('.')[2]}.txt"
    requirements.parent.mkdir(parents=True)
    requirements.write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    command = ["make", "-C", tmp_path, "-f", REPOSITORY / "Makefile", stamp]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    for status in (1, 0):
        program(tmp_path / ".venv" / "bin" / "python", f"exit {status}\n")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and (f"NOT INSTALLED: {says}" in done.stderr) == bool(status), done.stderr
        assert (tmp_path / stamp).exists() == (not status)
