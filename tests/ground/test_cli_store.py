"""`mooncake-connector store` on a real pool: what people and scripts read, and what is asked before pages go."""

import fcntl
import functools
import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console
from store.pools import edit, garble, running
from typer.testing import CliRunner

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli import store as store_
from mooncake_connector.cli.main import app
from mooncake_connector.errors import PoolError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Put
from store_client.embedded import folder as folder_
from store_client.testing import chain, namespace, put_chain

PAGE_NBYTES = 64 << 10
CAPACITY_NBYTES = 32 << 20
SMALL, LARGE = namespace("org/small"), namespace("org/[large]")
WHOLE, HALVES = Shard(0, 4, 0, 2), (Shard(0, 4, 0, 1), Shard(0, 4, 1, 2))
LARGE_ID, SMALL_ID = LARGE.digest.hex(), SMALL.digest.hex()
COMMANDS = ["stats", "ls", "clear", "verify", "destroy"]


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """The configured pool: 3 pages of one model, and 4 and 3 of another's two ranks."""
    folder = tmp_path / "pool"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(folder))
    with EmbeddedStore(folder, CAPACITY_NBYTES) as store:
        for name, shard, pages in ((SMALL, WHOLE, 3), (LARGE, HALVES[0], 4), (LARGE, HALVES[1], 3)):
            assert put_chain(store.space(name, shard), chain("a", pages)) == [Put.STORED] * pages
        store.space(SMALL, WHOLE).record_lookup(hit_pages=5, missed_pages=2, page_tokens=64)
    return folder


@pytest.fixture
def run(pool):
    """A command on that pool."""
    return lambda *arguments, **options: CliRunner().invoke(app, ["store", *map(str, arguments)], **options)


@pytest.fixture
def pages(run):
    """How many pages each model has."""
    def pages():
        names = json.loads(run("stats", "--json").stdout)["namespaces"]
        return {name["model_name"]: name["pages"] for name in names}

    return pages


def flip_a_byte(pool):
    (arena,) = pool.glob("*/arena")
    garble(arena, 1000, bytes([arena.read_bytes()[1000] ^ 1]))


class TestStats:
    def test_people_see_size_hits_and_models(self, run, pool):
        text = run("stats").stdout
        expected = [str(pool), "640.0 KiB of 32.0 MiB (2.0%)", "320 (71.4%", "128", "org/small", "org/[large]"]
        assert [word for word in expected if word not in text] == []

    def test_json_has_every_counter_and_the_sums_by_namespace(self, run, pool):
        value = json.loads(run("stats", "--json").stdout)
        assert (value["pages"], value["stored_pages"], value["location"]) == (10, 10, str(pool))
        assert (value["hit_tokens"], value["missed_tokens"], value["failures"]) == (320, 128, {})
        large, small = value["namespaces"]
        assert (small["model_name"], small["shards"], small["pages"]) == ("org/small", 1, 3)
        assert {key: large[key] for key in ("id", "model_name", "shards", "pages", "nbytes")} == {
            "id": LARGE_ID, "model_name": "org/[large]", "shards": 2, "pages": 7, "nbytes": 7 * PAGE_NBYTES,
        }  # fmt: skip
        assert large["oldest_s"] >= large["idle_s"] >= 0

    def test_looking_does_not_change_the_capacity(self, run):
        for _ in range(2):
            assert json.loads(run("stats", "--json").stdout)["capacity_nbytes"] == CAPACITY_NBYTES

    def test_an_empty_pool_has_no_table_of_namespaces(self, run, tmp_path):
        EmbeddedStore(tmp_path / "empty", 1 << 20).close()
        result = run("stats", "--pool", tmp_path / "empty")
        assert result.exit_code == 0 and "Namespaces" not in result.stdout


class TestList:
    def test_people_see_one_line_for_each_part_of_a_page(self, run):
        lines = [line.split() for line in run("ls").stdout.splitlines() if "org/" in line]
        assert [line[0] for line in lines] == [LARGE_ID[:8]] * 2 + [SMALL_ID[:8]]
        assert " ".join(lines[1][1:7]) == "org/[large] bfloat16 0-3/4 1-1/2 3 192.0"

    def test_json_has_the_whole_namespace(self, run):
        value = json.loads(run("ls", "--json").stdout)
        assert [Namespace.from_dict(entry["namespace"]) for entry in value] == [LARGE, LARGE, SMALL]
        assert value[1]["shard"] == {"layer_start": 0, "layer_stop": 4, "head_start": 1, "head_stop": 2}

    def test_an_empty_pool_says_so(self, run, tmp_path):
        EmbeddedStore(tmp_path / "empty", 1 << 20).close()
        assert run("ls", "--pool", tmp_path / "empty").stdout == "the pool is empty\n"
        assert json.loads(run("ls", "--pool", tmp_path / "empty", "--json").stdout) == []

    def test_a_pool_in_use_can_be_looked_at(self, run, pool):
        with EmbeddedStore(pool) as store:
            put_chain(store.space(namespace("org/third"), WHOLE), chain("a", 1))
            assert "org/third" in run("ls").stdout


class TestClear:
    def test_it_asks_and_goes_on_after_yes(self, run, pool, pages):
        result = run("clear", input="y\n")
        assert f"Remove 10 pages (640.0 KiB) of org/[large], org/small in {pool}?" in result.stderr
        assert (result.exit_code, result.stdout) == (0, "removed 10 pages\n")
        assert sum(pages().values()) == 0

    @pytest.mark.parametrize("answer", ["n\n", "\n", ""], ids=["no", "nothing", "end of input"])
    @pytest.mark.parametrize("command", ["clear", "destroy"])
    def test_without_a_yes_nothing_goes(self, run, pages, command, answer):
        result = run(command, input=answer)
        assert (result.exit_code, result.stdout) == (1, "") and "nothing was done" in result.stderr
        assert sum(pages().values()) == 10

    def test_yes_can_be_said_before(self, run):
        result = run("clear", "--yes", "--json", input="")
        assert (json.loads(result.stdout), result.stderr) == ({"cleared_pages": 10, "users": []}, "")

    def test_one_namespace_is_named_by_the_beginning_of_its_id(self, run, pages):
        assert "Remove 3 pages (192.0 KiB) of org/small in" in run("clear", "-n", SMALL_ID, input="n\n").stderr
        run("clear", "--yes", "--namespace", SMALL_ID[:8].upper())
        assert pages() == {"org/[large]": 7, "org/small": 0}

    @pytest.mark.parametrize("beginning, said", [("zz", "is no namespace of this pool"), ("", "is empty")])
    def test_an_id_that_does_not_name_one_namespace_is_an_error_that_lists_them(self, run, pages, beginning, said):
        result = run("clear", "--yes", "--namespace", beginning)
        assert result.exit_code == 1 and f"{said}; it has " in result.stderr
        assert f"{SMALL_ID[:8]} (org/small)" in result.stderr
        assert sum(pages().values()) == 10

    @pytest.mark.parametrize("arguments", [[], ["--namespace", "zz"]], ids=["question", "error"])
    def test_a_stored_name_forges_no_line_and_steers_no_terminal(self, run, pool, arguments):
        with EmbeddedStore(pool) as store:
            put_chain(store.space(namespace("org/x\n\x1b[2Kerror: none"), WHOLE), chain("a", 1))
        result = run("clear", *arguments, input="n\n")
        assert r"org/x\n\x1b[2Kerror: none" in result.stderr and "\x1b" not in result.stderr
        assert [line for line in result.stderr.splitlines() if line.startswith("error: none")] == []


class TestVerify:
    def test_sound_pages_exit_with_0(self, run):
        result = run("verify")
        assert (result.exit_code, result.output) == (0, "all 10 pages (640.0 KiB) are intact\n")

    def test_a_terminal_sees_a_bar_that_counts_pages(self, run, monkeypatch):
        screen = Console(force_terminal=True, file=io.StringIO(), width=100)
        monkeypatch.setattr(store_, "error_console", lambda: screen)
        assert run("verify").exit_code == 0
        assert "10/10" in screen.file.getvalue()

    @pytest.mark.parametrize("as_json", [False, True])
    def test_a_flipped_byte_is_found_once_and_exits_with_3(self, run, pool, as_json):
        flip_a_byte(pool)
        result = run("verify", *["--json"][:as_json])
        assert result.exit_code == 3
        if as_json:
            assert json.loads(result.stdout) == {"pages": 10, "nbytes": 10 * PAGE_NBYTES, "corrupt": 1}
        else:
            assert result.stdout == "1 of 10 pages were corrupt and have been removed\n"
        assert "all 9 pages" in run("verify").stdout


class TestDestroy:
    def test_it_asks_and_leaves_nothing_behind(self, run, pool):
        result = run("destroy", input="y\n")
        assert result.exit_code == 0 and f"Delete the pool {pool}" in result.stderr
        assert list(pool.parent.iterdir()) == []

    def test_json_says_what_was_freed(self, run, pool):
        value = json.loads(run("destroy", "--yes", "--json").stdout)
        assert value["pool"] == str(pool) and value["freed_nbytes"] >= 10 * PAGE_NBYTES

    def test_what_the_pool_did_not_make_stays(self, run, pool):
        (pool / "photos").mkdir()
        (pool / "photos" / "table").write_text("set for four")
        result = run("destroy", "--yes")
        assert (result.exit_code, [path.name for path in pool.iterdir()]) == (1, ["photos"])
        assert "is deleted, the folder is not: it also holds photos, which the pool did not make" in result.stderr
        assert (pool / "photos" / "table").exists()

    @pytest.mark.parametrize("content", [None, '{"length_m": 25}'], ids=["empty", "another's pool.json"])
    def test_a_folder_that_is_no_pool_is_not_deleted(self, run, tmp_path, content):
        club = tmp_path / "club"
        club.mkdir()
        if content is not None:
            (club / "pool.json").write_text(content)
        result = run("destroy", "--yes", "--pool", club)
        assert (result.exit_code, club.exists()) == (1, True)
        assert f"pool folder {club} is not a pool" in result.stderr
        assert content is None or (club / "pool.json").exists()

    def test_a_link_to_a_pool_is_not_followed(self, run, pool, tmp_path):
        (tmp_path / "link").symlink_to(pool)
        result = run("destroy", "--yes", "--pool", tmp_path / "link")
        assert (result.exit_code, pool.exists()) == (1, True) and "is a symbolic link" in result.stderr

    def test_a_pool_that_is_damaged_can_still_be_destroyed(self, run, pool):
        (pool / "pool.json").write_text("[" * 100000)
        assert "unknown" in run("destroy", input="n\n").stderr
        assert run("destroy", "--yes").exit_code == 0 and not pool.exists()


class TestWhoUsesIt:
    @pytest.fixture
    def user(self, pool):
        """Another process that has the pool open."""
        with running("print('open', flush=True); sys.stdin.read()", pool) as process:
            yield process

    def test_stats_list_every_process_that_has_it_open(self, run, pool, user):
        (found,) = json.loads(run("stats", "--json").stdout)["users"]
        assert (found["pid"], found["here"]) == (user.pid, True)
        assert found["command"].startswith(f"{sys.executable} -c ")  # what follows is cut where that is a long path
        assert f"pid {user.pid}" in run("stats").stdout

    def test_where_the_pool_stays_locked_the_error_names_them(self, run, pool, user, monkeypatch):
        monkeypatch.setattr(pool_, "EmbeddedStore", functools.partial(EmbeddedStore, deadline_s=0.2))
        (table,) = pool.glob("*/table")
        with table.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            error = json.loads(run("stats", "--json").stdout)["error"]
        assert "stayed locked" in error and f"; it is open in pid {user.pid} ({sys.executable} -c " in error

    def test_without_any_they_say_so(self, run):
        assert "Used by no other process" in run("stats").stdout
        assert json.loads(run("stats", "--json").stdout)["users"] == []

    @pytest.mark.parametrize("command", ["clear", "destroy"])
    def test_before_pages_go_they_are_named_also_where_nobody_is_asked(self, run, pool, user, command):
        result = run(command, input="n\n")
        assert result.exit_code == 1 and pool.exists()
        assert f"pid {user.pid}" in result.stderr and result.stderr.index("pid") < result.stderr.index("[y/N]")
        result = run(command, "--yes", "--json")
        assert f"pid {user.pid}" in result.stderr
        assert [entry["pid"] for entry in json.loads(result.stdout)["users"]] == [user.pid]


class TestErrors:
    def test_a_pool_that_is_not_there_is_named_with_what_to_do_and_not_made(self, run, tmp_path):
        result = run("stats", "--pool", tmp_path / "absent")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: pool folder {tmp_path / 'absent'} does not exist: ")
        assert "--pool or MOONCAKE_CONNECTOR_POOL" in result.stderr
        assert not (tmp_path / "absent").exists()

    @pytest.mark.parametrize("room", [True, False], ids=["where engines put it", "where there was room"])
    def test_with_nothing_configured_the_default_pool_is_found(self, run, pool, monkeypatch, room):
        monkeypatch.delenv("MOONCAKE_CONNECTOR_POOL")
        monkeypatch.setattr(folder_, "default_pool_path", lambda: pool if room else pool.parent / "shm" / pool.name)
        monkeypatch.setattr(folder_.tempfile, "gettempdir", lambda: str(pool.parent))
        assert run("stats").exit_code == 0

    def test_a_relative_pool_is_taken_from_the_working_folder(self, run, pool, monkeypatch):
        monkeypatch.chdir(pool.parent)
        assert run("stats", "--pool", "pool").exit_code == 0

    def test_a_pool_that_cannot_be_opened_is_one_line(self, run, monkeypatch):
        def refuse(folder, *, rebuild):
            raise PoolError(f"pool folder {folder} belongs to user 7")

        monkeypatch.setattr(pool_, "EmbeddedStore", refuse)
        result = run("stats")
        assert result.exit_code == 1
        assert re.fullmatch(r"error: pool folder \S+ belongs to user 7\n", result.stderr)

    @pytest.mark.parametrize("command", ["stats", "ls", "clear", "verify"])
    def test_a_command_that_looks_at_a_pool_does_not_make_it_anew_and_closes_it(self, run, pool, monkeypatch, command):
        opened = []

        def open_store(*args, **options):
            opened.append(EmbeddedStore(*args, **options))
            return opened[-1]

        monkeypatch.setattr(pool_, "EmbeddedStore", open_store)
        assert run(command, input="n\n").exit_code in (0, 1)
        with pytest.raises(PoolError, match="closed"):
            opened[0].stats()
        edit(pool, boot_id="another boot")
        assert run(command).exit_code == 1 and "another boot" in (pool / "pool.json").read_text()

    @pytest.mark.parametrize("command", COMMANDS)
    def test_an_empty_pool_option_is_wrong_usage_and_not_the_current_folder(self, run, pool, monkeypatch, command):
        monkeypatch.chdir(pool)
        result = run(command, "--pool", "")
        assert (result.exit_code, result.stdout) == (2, "") and "empty" in result.stderr and pool.exists()

    @pytest.mark.parametrize("command", COMMANDS)
    def test_an_error_is_json_where_json_was_asked_for(self, run, tmp_path, command):
        result = run(command, "--json", "--pool", tmp_path / "absent")
        assert result.exit_code == 1 and result.stderr.startswith("error: pool folder ")
        assert json.loads(result.stdout)["error"] == result.stderr.removeprefix("error: ").rstrip()

    def test_so_is_an_answer_that_was_no_yes(self, run):
        result = run("clear", "--json", input="n\n")
        assert result.exit_code == 1 and "nothing was done" in json.loads(result.stdout)["error"]

    def test_so_is_an_error_that_nobody_expected(self, run, monkeypatch):
        monkeypatch.setattr(EmbeddedStore, "stats", lambda self: {}["gone"])
        result = run("stats", "--json")
        assert result.exit_code == 1 and "KeyError" in json.loads(result.stdout)["error"]
        assert "Traceback" not in result.output

    def test_a_process_of_its_own_prints_the_result_on_stdout_and_errors_on_stderr(self, pool):
        command = [sys.executable, "-m", "mooncake_connector.cli.main", "store", "stats", "--json", "--pool"]
        right = subprocess.run([*command, str(pool)], capture_output=True, text=True)
        assert (right.returncode, right.stderr, json.loads(right.stdout)["pages"]) == (0, "", 10)
        wrong = subprocess.run([*command, str(pool.parent)], capture_output=True, text=True)
        assert (wrong.returncode, wrong.stderr) == (1, f"error: {json.loads(wrong.stdout)['error']}\n")
        assert wrong.stderr.startswith(f"error: pool folder {pool.parent} is not a pool")
        assert wrong.stderr.count("\n") == 1

    def test_a_question_that_nobody_can_answer_is_no(self, pool):
        shell = f"{sys.executable} -m mooncake_connector.cli.entry store clear --pool {pool} <&-"
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
        assert done.returncode == 1 and "nothing was done; answer y, or use --yes" in done.stderr
