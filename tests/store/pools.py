"""Pools for the tests: what lies behind a store, what its folder holds, and programs of other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.programs import run_program

from store_client import EmbeddedStore, Put, Space
from store_client.embedded.arena import GRANULE
from store_client.embedded.pool import Pool
from store_client.testing import SHARD, chain, namespace, put_chain

CAPACITY = 8 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root (mount, chown)")
IMPORTS = """
import os, sys, time
from pathlib import Path
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put
from store_client.testing import *
"""
OPENED = """
store = EmbeddedStore(sys.argv[1])
space = store.space(namespace(), SHARD)
"""


def inside(store: EmbeddedStore) -> Pool:
    """What is opened behind the public interface."""
    assert store._handle._pool is not None
    return store._handle._pool


def space_in(store: EmbeddedStore, name: str = "m") -> Space:
    return store.space(namespace(name), SHARD)


def fill(pool: Path, count: int = 4, capacity: int = CAPACITY) -> list[bytes]:
    """A pool in which a chain was stored, and which nobody has open; returns the keys."""
    keys = chain("a", count)
    with EmbeddedStore(pool, capacity) as store:
        assert put_chain(space_in(store), keys) == [Put.STORED] * count
    return keys


def fragment(store: EmbeddedStore) -> None:
    """Leave free space in runs of 8 KiB only: every second small page of a full pool is removed."""
    other, nbytes = space_in(store, "small"), 2 * GRANULE
    keys = chain("small", CAPACITY // nbytes)
    assert put_chain(other, keys, nbytes) == [Put.STORED] * len(keys)
    other.remove(keys[::2])


def works(store: EmbeddedStore) -> bool:
    """A chain that nobody has stored is stored and found."""
    keys = chain(os.urandom(8).hex(), 4)
    return put_chain(space_in(store), keys, 4096) == [Put.STORED] * 4 and space_in(store).lookup(keys).pages == 4


def data_folder(pool: Path) -> Path:
    return pool / str(json.loads((pool / "pool.json").read_text())["id"])


def edit(pool: Path, **changes: object) -> None:
    """Change the pool's description."""
    file = pool / "pool.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def garble(file: Path, at: int, content: bytes) -> None:
    """Overwrite a part of a file that others may have mapped."""
    with open(file, "r+b", buffering=0) as opened:
        opened.seek(at)
        opened.write(content)


@contextmanager
def mounted(pool: Path, options: str) -> Iterator[None]:
    """The pool's folder is a file system of its own."""
    pool.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "none", pool], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", pool], check=True)


def program(code: str, *arguments: object, opened: bool = True) -> list[str]:
    """The command of a process that runs `code`, with the pool of the first argument open as `store` and `space`."""
    return [sys.executable, "-c", text_of(code, opened), *map(str, arguments)]


def text_of(code: str, opened: bool) -> str:
    return IMPORTS + (OPENED if opened else "") + textwrap.dedent(code)


def run(code: str, *arguments: object, opened: bool = True) -> subprocess.CompletedProcess[str]:
    """The same, until it has ended; it is forked, since most programs do less than the start of Python."""
    return run_program(text_of(code, opened), list(map(str, arguments)))


@contextmanager
def running(code: str, *arguments: object, opened: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Another process, from its first line on stdout on; killed in the end."""
    command = program(code, *arguments, opened=opened)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline(), "it ended before it was ready"
            yield process
        finally:
            process.kill()
