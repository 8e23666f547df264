"""What is set up: what cannot be had is named, holds up nothing else, and is tried again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SYSTEM_PACKAGES = REPOSITORY / "tests" / "tools" / "system_packages.sh"
INSTALL_PYTHON = REPOSITORY / "tests" / "tools" / "install_python.sh"

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


# Another Python: it makes environments of itself, installs nothing, and leaves programs to the one of these tests.
OTHER_PYTHON = """
echo "$@" >>"$STATE/calls"
[[ $1 != - ]] || exec {python} -
[[ $2 != venv ]] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }}
[[ "$*" != *"pip install"* ]] || exit "$NO_NETWORK"
"""


@pytest.fixture
def install_python(tmp_path: Path) -> Run:
    """Runs the script for Python 3.98. The one on the PATH is a shim that does not start; pyenv has 3.9.1 besides."""
    programs, versions = tmp_path / "programs", tmp_path / "pyenv" / "versions"
    programs.mkdir()
    program(programs / "pyenv", f"echo {tmp_path / 'pyenv'}\n")
    program(programs / "python3.98", "echo 'pyenv: python3.98: command not found' >&2; exit 127\n")

    def run(*options: str, has_it: bool = True, no_network: int = 0) -> subprocess.CompletedProcess[str]:
        for version in ("3.9.1", "3.98.2") if has_it else ("3.9.1",):
            (versions / version / "bin").mkdir(parents=True)
            program(versions / version / "bin" / "python", OTHER_PYTHON.format(python=sys.executable))
        environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "STATE": str(tmp_path),
            "NO_NETWORK": str(no_network),
        }  # fmt: skip
        command = [INSTALL_PYTHON, *options, "3.98", "list.txt", tmp_path / "made", "a.whl"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    return run


class TestOtherPython:
    def test_one_of_pyenv_is_taken_where_that_on_the_path_does_not_start(self, install_python, tmp_path):
        done = install_python()
        assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "made" / ".made").exists()
        assert "a.whl[index,object] -r list.txt" in (tmp_path / "calls").read_text()

    @pytest.mark.parametrize("state", [{"has_it": False}, {"no_network": 1}], ids=["no such Python", "no network"])
    def test_what_cannot_be_made_is_said_and_leaves_no_stamp(self, install_python, tmp_path, state):
        done = install_python(**state)
        assert done.returncode == 0 and not (tmp_path / "made" / ".made").exists()
        assert f"NOT INSTALLED: {tmp_path / 'made'} with Python 3.98; its tests are skipped" in done.stderr
        assert ("there is no Python 3.98" in done.stderr) == ("has_it" in state)

    def test_the_lowest_versions_are_those_that_are_declared(self, install_python, tmp_path):
        install_python("--lowest")
        asked = [line.partition(";")[0].strip() for line in (tmp_path / "made" / "lowest.txt").read_text().splitlines()]
        declared = {requirement.partition(";")[0] for requirement in requires("mooncake-connector") or []}
        assert {pinned.replace("==", ">=") for pinned in asked} <= declared
        assert {pinned.partition("==")[0] for pinned in asked} >= {"typer", "tomli", "uvicorn", "obstore"}
        assert "made/lowest.txt -r list.txt" in (tmp_path / "calls").read_text()
