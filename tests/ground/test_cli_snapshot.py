"""`mooncake-connector store snapshot` and `restore` on real pools: what people and scripts read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from store.pools import garble
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore, Put
from store_client.embedded import default_pool_path
from store_client.testing import chain, namespace, put_chain

CAPACITY = 16 << 20
SMALL, LARGE = namespace("org/small"), namespace("org/large")
SHARD = Shard(0, 4, 0, 2)
PAGE_NBYTES = 64 << 10


@pytest.fixture
def pool(tmp_path, monkeypatch):
    folder = tmp_path / "pool"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(folder))
    with EmbeddedStore(folder, CAPACITY) as store:
        for name, pages in ((SMALL, 3), (LARGE, 5)):
            assert put_chain(store.space(name, SHARD), chain("a", pages)) == [Put.STORED] * pages
    return folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "saved"


@pytest.fixture
def run(pool):
    return lambda *arguments: CliRunner().invoke(app, ["store", *map(str, arguments)])


def pages_in(pool):
    with EmbeddedStore(pool, rebuild=False) as store:
        return {space.namespace.model_name: space.pages for space in store.namespaces()}


def test_a_pool_is_saved_and_restored(run, pool, folder):
    saved = run("snapshot", folder)
    assert saved.exit_code == 0 and saved.stdout.startswith(f"saved {folder}: 8 pages, 512.0 KiB in ")
    assert run("snapshot", folder).stdout.startswith(f"replaced {folder}: 8 pages")
    assert run("destroy", "--yes").exit_code == 0
    restored = run("restore", folder)
    assert restored.exit_code == 0 and restored.stdout.startswith(f"restored 8 pages to {pool}, 512.0 KiB in ")
    assert pages_in(pool) == {"org/small": 3, "org/large": 5}
    again = run("restore", folder).stdout.splitlines()
    assert again[0].startswith("restored 0 pages") and again[1] == "8 pages were in the pool already"


def test_scripts_read_json(run, pool, folder):
    saved = json.loads(run("snapshot", folder, "--json").stdout)
    assert saved.pop("seconds") > 0
    assert saved == {
        "path": str(folder), "pages": 8, "nbytes": 8 * PAGE_NBYTES, "spaces": 2, "changed_pages": 0, "corrupt_pages": 0,
        "unnamed_pages": 0, "replaced": False, "remains": False,
    }  # fmt: skip
    restored = json.loads(run("restore", folder, "--pool", pool.with_name("other"), "--json").stdout)
    assert restored.pop("seconds") > 0
    assert restored == {
        "pool": str(pool.with_name("other")), "pages": 8, "nbytes": 8 * PAGE_NBYTES, "present_pages": 0,
        "damaged_pages": 0, "no_room_pages": 0, "unknown_pages": 0, "failed_pages": 0,
    }  # fmt: skip


def test_a_new_pool_has_the_size_of_the_saved_one(run, pool, folder, monkeypatch):
    run("snapshot", folder)
    run("restore", folder, "--pool", pool.with_name("other"))
    with EmbeddedStore(pool.with_name("other"), rebuild=False) as store:
        assert store.stats().capacity_nbytes == CAPACITY
    monkeypatch.setenv("MOONCAKE_CONNECTOR_CAPACITY", "4MiB")
    run("restore", folder, "--pool", pool.with_name("third"))
    with EmbeddedStore(pool.with_name("third"), rebuild=False) as store:
        assert store.stats().capacity_nbytes == 4 << 20


def test_a_pool_that_is_there_keeps_its_size_and_pages(run, pool, folder):
    run("snapshot", folder)
    with EmbeddedStore(pool.with_name("other"), 2 << 20) as store:
        put_chain(store.space(SMALL, SHARD), chain("b", 30))
    restored = json.loads(run("restore", folder, "--pool", pool.with_name("other"), "--json").stdout)
    assert (restored["pages"], restored["no_room_pages"]) == (2, 6)
    text = run("restore", folder, "--pool", pool.with_name("other")).stdout
    assert "6 pages found no room, those that were not used for the longest time" in text
    with EmbeddedStore(pool.with_name("other"), rebuild=False) as store:
        assert store.stats().capacity_nbytes == 2 << 20 and store.stats().evicted_pages == 0


def test_one_namespace(run, pool, folder):
    assert run("snapshot", folder).exit_code == 0
    other = pool.with_name("other")
    assert run("restore", folder, "--pool", other, "--namespace", SMALL.digest.hex()[:10]).exit_code == 0
    assert pages_in(other) == {"org/small": 3}
    assert json.loads(run("snapshot", folder, "-n", LARGE.digest.hex()[:10], "--json").stdout)["pages"] == 5
    refused = run("restore", folder, "-n", SMALL.digest.hex()[:10])
    assert refused.exit_code == 1 and "is no namespace of this snapshot; it has" in refused.stderr


def test_damaged_pages_are_exit_code_3_and_the_others_are_there(run, pool, folder):
    run("snapshot", folder)
    run("clear", "--yes")
    garble(folder / "pages.00000", 1000, bytes([(folder / "pages.00000").read_bytes()[1000] ^ 1]))
    result = run("restore", folder)
    assert result.exit_code == 3 and result.stdout.splitlines()[1] == "1 pages were damaged, and left out"
    assert sum(pages_in(pool).values()) == 7


def test_pages_that_were_left_out_are_said(run, pool, folder):
    (arena,) = pool.glob("*/arena")
    garble(arena, 1000, bytes([arena.read_bytes()[1000] ^ 1]))
    assert "left out: 1 pages that did not match their checksum" in run("snapshot", folder).stdout


def test_an_empty_pool_is_not_saved(run, folder):
    run("snapshot", folder)
    run("clear", "--yes")
    result = run("snapshot", folder)
    assert (result.exit_code, result.stdout) == (0, f"the pool has no pages to save; {folder} is as it was\n")
    assert run("restore", folder).stdout.startswith("restored 8 pages")


def test_remains_are_said(run, folder):
    folder.with_name("saved.partial").mkdir()
    result = run("snapshot", folder)
    assert result.exit_code == 0 and "the remains of a snapshot that was not finished were removed" in result.stderr


@pytest.mark.parametrize("command", ["snapshot", "restore"])
def test_errors_are_one_line(run, tmp_path, command):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    result = run(command, tmp_path / "mine")
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {tmp_path / 'mine'} is not a snapshot of a pool")
    assert result.stderr.count("\n") == 1 and os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_restore_makes_the_pool_that_engines_use_by_default(run, folder, monkeypatch, tmp_path):
    """Nothing is configured, and there is no pool: as after a reboot."""
    run("snapshot", folder)
    usual = tmp_path / default_pool_path().name
    monkeypatch.delenv("MOONCAKE_CONNECTOR_POOL")
    monkeypatch.setattr("store_client.embedded.folder.default_pool_path", lambda: usual)
    assert run("restore", folder).stdout.startswith(f"restored 8 pages to {usual}")
    assert sum(pages_in(usual).values()) == 8


def test_ctrl_c_leaves_nothing(pool, folder):
    code = (
        "import sys, os, signal, threading\n"
        "from store_client.snapshot import files\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # below nohup it is ignored
        "files.PagesWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGINT)\n"
        "from mooncake_connector.cli.main import main\n"
        "sys.argv = ['mooncake-connector', 'store', 'snapshot', sys.argv[1]]\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 130, ended.stderr
    assert sorted(os.listdir(folder.parent)) == ["pool"]
