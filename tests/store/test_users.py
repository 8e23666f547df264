"""Who uses a pool: every live process that has it open, told without opening the pool, and nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from store.pools import running

from store_client import EmbeddedStore
from store_client.embedded import pool_users

SECRETS = [
    "--api-key", "hunter2", "hunter2 the second", "--hf-token=hunter2", '{"my_key": "hunter2"}', "--token", "hunter2",
]  # fmt: skip


@pytest.fixture
def user(pool: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the pool open; its program is in a file, since long command lines are cut."""
    script = pool.with_name("user.py")
    script.write_text(
        "import sys\n"
        "from store_client import EmbeddedStore\n"
        "with EmbeddedStore(sys.argv[1], 1 << 20):\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, str(script), str(pool), *SECRETS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


def owner_file(pool: Path) -> Path:
    (path,) = pool.glob("*/owners/*")
    return path


def describe(pool: Path, content: bytes) -> None:
    """Put another description in place; the counts behind it stay, which the process has mapped."""
    with owner_file(pool).open("r+b") as file:
        file.write(content.ljust(4096, b"\0"))


def test_another_process_is_named_with_its_command(pool, user):
    (found,) = pool_users(pool) or []
    assert (found.pid, found.here) == (user.pid, True) and found.since_s < 3600
    assert found.command.startswith(sys.executable) and str(pool) in found.command


def test_what_looks_like_a_secret_is_neither_told_nor_written_down(pool, user):
    (found,) = pool_users(pool) or []
    assert found.command.endswith('--api-key *** *** --hf-token=*** {"my_key": "***"} --token ***')
    assert "hunter2" not in found.command
    assert b"--api-key *** ***" in owner_file(pool).read_bytes() and b"hunter2" not in owner_file(pool).read_bytes()


def test_one_that_was_killed_is_not_named(pool, user):
    user.kill()
    user.wait()
    assert owner_file(pool).exists() and pool_users(pool) == []


def test_this_process_does_not_count_itself(pool):
    with EmbeddedStore(pool, 1 << 20):
        assert pool_users(pool) == []


def test_one_of_another_pid_namespace_is_told_apart(pool, user):
    said = json.loads(owner_file(pool).read_bytes().partition(b"\0")[0])
    describe(pool, json.dumps(said | {"namespace": "pid:[1] of another", "host": "pod-7"}).encode())
    (found,) = pool_users(pool) or []
    assert (found.pid, found.here, found.host) == (user.pid, False, "pod-7") and str(pool) in found.command


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{}", b"[" * 5000, b'{"pid": ' + b"9" * 4000, b'{"pid": [], "since": 1}']
)
def test_one_that_left_no_description_still_counts(pool, user, content):
    describe(pool, content)
    (found,) = pool_users(pool) or []
    assert (found.pid, found.command) == (None, "")


@pytest.mark.slow
def test_looking_does_not_wait_for_one_that_was_stopped_while_it_opened(pool, user):
    hold = """
        from store_client.embedded.locks import FileLock
        FileLock(Path(sys.argv[1])).acquire(time.monotonic() + 60)
        print('held', flush=True)
        sys.stdin.read()
    """
    with running(hold, pool / "open.lock", opened=False):
        assert pool_users(pool) is None


def test_a_pool_that_is_not_there_has_no_users_and_is_not_made(pool):
    assert pool_users(pool) == [] and not pool.exists()
