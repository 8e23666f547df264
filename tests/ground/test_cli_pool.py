"""The command line on a real pool: what the store holds is what a person is shown."""

import fcntl
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.main import app
from mooncake_connector.cli.tables import users_lines
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Put
from store_client.embedded import PoolUser
from store_client.testing import put_pages

PAGE_NBYTES = 64 << 10
CAPACITY_NBYTES = 32 << 20
WHOLE = Shard(0, 2, 0, 1)


def namespace(model_name: str) -> Namespace:
    return Namespace(
        model_name=model_name,
        model_digest=f"digest of {model_name}",
        kv_dtype="bfloat16",
        num_layers=2,
        num_kv_heads=1,
        head_dim=64,
        page_tokens=64,
    )


FIRST, SECOND = namespace("org/first"), namespace("org/second")


def fill(store: EmbeddedStore, name: Namespace, pages: int) -> None:
    keys = page_keys(list(range(64 * pages)), 64)
    content = [bytes([i % 251]) * PAGE_NBYTES for i in range(pages)]
    parents = [None, *keys[:-1]]
    assert put_pages(store.space(name, WHOLE), keys, content, parents=parents, deadline_s=10.0) == [Put.STORED] * pages


@pytest.fixture
def pool(tmp_path) -> Path:
    folder = tmp_path / "pool"
    with EmbeddedStore(folder, CAPACITY_NBYTES) as store:
        fill(store, FIRST, 7)
        fill(store, SECOND, 3)
        store.space(FIRST, WHOLE).record_lookup(hit_pages=5, missed_pages=2, page_tokens=64)
    return folder


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def test_stats_add_up_by_model(pool):
    stats = json.loads(run("store", "stats", "--pool", pool, "--json"))
    assert (stats["pages"], stats["stored_pages"], stats["location"]) == (10, 10, str(pool))
    assert (stats["hit_tokens"], stats["missed_tokens"]) == (320, 128)
    by_model = {entry["model_name"]: (entry["pages"], entry["nbytes"]) for entry in stats["namespaces"]}
    assert by_model == {"org/first": (7, 7 * PAGE_NBYTES), "org/second": (3, 3 * PAGE_NBYTES)}


def test_looking_does_not_change_the_capacity(pool):
    for _ in range(2):
        assert json.loads(run("store", "stats", "--pool", pool, "--json"))["capacity_nbytes"] == CAPACITY_NBYTES


def test_ls_gives_back_the_namespaces_that_were_stored(pool):
    entries = json.loads(run("store", "ls", "--pool", pool, "--json"))
    assert [Namespace.from_dict(entry["namespace"]) for entry in entries] == [FIRST, SECOND]


def test_a_pool_in_use_can_be_looked_at(pool):
    with EmbeddedStore(pool) as store:
        fill(store, namespace("org/third"), 1)
        assert "org/third" in run("store", "ls", "--pool", pool)


def test_a_flipped_byte_is_found_once(pool):
    assert "all 10 pages" in run("store", "verify", "--pool", pool)
    (arena,) = pool.rglob("arena")
    content = bytearray(arena.read_bytes())
    content[content.index(bytes([5]) * PAGE_NBYTES) + 1000] ^= 1
    with arena.open("r+b") as file:
        file.write(content)
    assert "1 of 10 pages were corrupt" in run("store", "verify", "--pool", pool, code=3)
    assert "all 9 pages" in run("store", "verify", "--pool", pool)


def test_clear_of_one_namespace_leaves_the_other(pool):
    run("store", "clear", "--pool", pool, "--namespace", FIRST.digest.hex()[:12], "--yes")
    stats = json.loads(run("store", "stats", "--pool", pool, "--json"))
    assert {entry["model_name"]: entry["pages"] for entry in stats["namespaces"] if entry["pages"]} == {"org/second": 3}


def test_clear_without_a_namespace_empties_the_pool(pool):
    run("store", "clear", "--pool", pool, "--yes")
    assert json.loads(run("store", "stats", "--pool", pool, "--json"))["pages"] == 0


def test_destroy_leaves_nothing_behind(pool):
    run("store", "destroy", "--pool", pool, "--yes")
    assert list(pool.parent.iterdir()) == []


def test_a_process_of_its_own_prints_the_result_on_stdout_and_errors_on_stderr(pool):
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "store", "stats", "--json", "--pool"]
    right = subprocess.run([*command, str(pool)], capture_output=True, text=True)
    assert (right.returncode, right.stderr, json.loads(right.stdout)["pages"]) == (0, "", 10)
    wrong = subprocess.run([*command, str(pool.parent)], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (1, f"error: {json.loads(wrong.stdout)['error']}\n")
    assert wrong.stderr.startswith(f"error: pool folder {pool.parent} is not a pool") and wrong.stderr.count("\n") == 1


@pytest.fixture
def user(pool) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the pool open."""
    program = (
        "import sys; from store_client import EmbeddedStore; store = EmbeddedStore(sys.argv[1]); "
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(pool)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield process
        process.kill()


class TestWhoUsesIt:
    def test_stats_list_every_process_that_has_it_open(self, pool, user):
        (found,) = json.loads(run("store", "stats", "--pool", pool, "--json"))["users"]
        assert (found["pid"], found["here"]) == (user.pid, True) and str(pool) in found["command"]
        assert f"pid {user.pid}" in run("store", "stats", "--pool", pool)

    def test_where_the_pool_stays_locked_the_error_names_them(self, pool, user, monkeypatch):
        monkeypatch.setattr(pool_, "EmbeddedStore", functools.partial(EmbeddedStore, deadline_s=0.2))
        (table,) = pool.glob("*/table")
        with table.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            error = json.loads(run("store", "stats", "--pool", pool, "--json", code=1))["error"]
        assert "stayed locked" in error and f"; it is open in pid {user.pid} ({sys.executable} -c " in error

    def test_without_any_they_say_so(self, pool):
        assert "Used by no other process" in run("store", "stats", "--pool", pool)
        assert json.loads(run("store", "stats", "--pool", pool, "--json"))["users"] == []

    @pytest.mark.parametrize("command", ["clear", "destroy"])
    def test_before_pages_go_they_are_named(self, pool, user, command):
        result = CliRunner().invoke(app, ["store", command, "--pool", str(pool)], input="n\n")
        assert result.exit_code == 1 and pool.exists()
        assert f"pid {user.pid}" in result.stderr and result.stderr.index("pid") < result.stderr.index("[y/N]")

    @pytest.mark.parametrize("command", ["clear", "destroy"])
    def test_they_are_named_also_where_nobody_is_asked(self, pool, user, command):
        result = CliRunner().invoke(app, ["store", command, "--pool", str(pool), "--yes", "--json"])
        assert f"pid {user.pid}" in result.stderr
        assert [entry["pid"] for entry in json.loads(result.stdout)["users"]] == [user.pid]

    def test_a_pool_that_is_damaged_can_still_be_destroyed(self, pool):
        (pool / "pool.json").write_text("[" * 100000)
        assert "unknown" in CliRunner().invoke(app, ["store", "destroy", "--pool", str(pool)], input="n\n").stderr
        run("store", "destroy", "--pool", pool, "--yes")
        assert not pool.exists()


def test_one_in_another_container_is_shown_as_such():
    user = PoolUser(pid=7, here=False, host="pod-7", since_s=90.0, command="vllm serve MODEL")
    assert users_lines([user], 200)[2].split("  ") == [
        "pid 7 in another container (host name pod-7)",
        "2 min",
        "vllm serve MODEL",
    ]
    assert "  process" not in "".join(users_lines([user], 40)) and "pod-7" in "".join(users_lines([user], 40))
