"""`mooncake-connector store`: what a person reads, what a script reads, and what is asked before pages go."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli import store as store_
from mooncake_connector.cli import tables
from mooncake_connector.cli.main import app
from mooncake_connector.errors import PoolError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client import SpaceInfo, StoreStats, VerifyReport

GIB = 1 << 30


def namespace(model_name: str, **fields: object) -> Namespace:
    values = {
        "model_name": model_name,
        "model_digest": f"digest of {model_name}",
        "kv_dtype": "bfloat16",
        "num_layers": 30,
        "num_kv_heads": 4,
        "head_dim": 64,
        "page_tokens": 64,
    }
    return Namespace(**{**values, **fields})


SMALL = namespace("org/small")
LARGE = namespace("org/[large]")
SPACES = [
    SpaceInfo(SMALL, Shard(0, 30, 0, 4), pages=10, nbytes=10 << 20, oldest_s=7200.0, idle_s=30.0),
    SpaceInfo(LARGE, Shard(0, 30, 0, 2), pages=100, nbytes=1 * GIB, oldest_s=400000.0, idle_s=900.0),
    SpaceInfo(LARGE, Shard(0, 30, 2, 4), pages=90, nbytes=1 * GIB, oldest_s=300.0, idle_s=5.0),
]
STATS = StoreStats(
    location="/dev/shm/pool",
    capacity_nbytes=8 * GIB,
    used_nbytes=2 * GIB,
    pages=200,
    index_nbytes=3 << 20,
    max_pages=262144,
    hit_tokens=6400,
    missed_tokens=1600,
    evicted_pages=17,
    failures={"full": 2, "busy": 0},
)


DATA = "0123456789abcdef" * 2


class FakeStore:
    """Answers with what a test put in, and keeps what it was asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = VerifyReport(pages=200, nbytes=2 * GIB, corrupt=0)
        self.spaces, self.state = SPACES, STATS
        self.cleared: list[bytes | None] = []
        self.closed = False

    def stats(self):
        return self.state

    def namespaces(self):
        return self.spaces

    def clear(self, namespace_digest=None):
        self.cleared.append(namespace_digest)
        return 200

    def verify(self, progress=None):
        for done in (0, 100, 200):
            if progress is not None:
                progress(done, 200)
        return self.report

    def close(self):
        self.closed = True


@pytest.fixture
def pool(tmp_path) -> Path:
    folder = tmp_path / "pool"
    folder.mkdir()
    (folder / "pool.json").write_text(json.dumps({"format": 2, "id": DATA}))
    return folder


@pytest.fixture
def store(pool, monkeypatch) -> FakeStore:
    fake = FakeStore(pool)

    def open_store(folder: Path, *, rebuild: bool) -> FakeStore:
        assert folder == pool
        assert not rebuild, "a command that looks at a pool must not make it anew"
        return fake

    monkeypatch.setattr(pool_, "EmbeddedStore", open_store)
    monkeypatch.setattr(store_, "pool_users", lambda folder: [])
    return fake


@pytest.fixture
def run(pool, store, monkeypatch) -> Callable:
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(pool))
    return lambda *arguments, **options: CliRunner().invoke(app, arguments, **options)


class TestStats:
    def test_people_see_size_hits_evictions_failures_and_models(self, run):
        text = run("store", "stats").stdout
        expected = ["/dev/shm/pool", "2.0 GiB of 8.0 GiB (25.0%)", "200", "6,400 (80.0%", "1,600", "17 pages", "full 2"]
        assert [word for word in [*expected, "org/small", "org/[large]"] if word not in text] == []
        assert "busy" not in text

    def test_json_has_every_counter_and_the_sums_by_namespace(self, run):
        value = json.loads(run("store", "stats", "--json").stdout)
        assert (value["hit_tokens"], value["failures"]) == (6400, {"full": 2, "busy": 0})
        assert value["namespaces"][0] == {
            "id": LARGE.digest.hex(),
            "model_name": "org/[large]",
            "kv_dtype": "bfloat16",
            "page_tokens": 64,
            "shards": 2,
            "pages": 190,
            "nbytes": 2 * GIB,
            "oldest_s": 400000.0,
            "idle_s": 5.0,
        }

    def test_an_empty_pool_has_no_table_of_namespaces(self, run, store):
        store.spaces, store.state = [], StoreStats("/dev/shm/pool", GIB, 0, 0, 0, 100)
        result = run("store", "stats")
        assert result.exit_code == 0 and "Namespaces" not in result.stdout

    def test_the_store_is_closed(self, run, store):
        run("store", "stats")
        assert store.closed


class TestList:
    def test_people_see_one_line_for_each_part_of_a_page(self, run):
        lines = [line.split() for line in run("store", "ls").stdout.splitlines() if "org/" in line]
        assert [line[0] for line in lines] == [LARGE.digest.hex()[:8]] * 2 + [SMALL.digest.hex()[:8]]
        assert " ".join(lines[1][1:]) == "org/[large] bfloat16 0-29/30 2-3/4 90 1.0 GiB 5 min 5 s"

    @pytest.mark.parametrize("width", [40, 80, 200, None])
    def test_no_terminal_is_too_narrow_for_it(self, width):
        text = "\n".join(tables.spaces_lines(SPACES, width))
        expected = ["bfloat16", "0-29/30", "2-3/4", "10.0 MiB", "4.6 d", "15 min", "org/[large]"]
        assert [word for word in expected if word not in text] == []

    def test_json_has_the_whole_namespace(self, run):
        value = json.loads(run("store", "ls", "--json").stdout)
        assert Namespace.from_dict(value[2]["namespace"]) == SMALL
        assert value[1]["shard"] == {"layer_start": 0, "layer_stop": 30, "head_start": 2, "head_stop": 4}

    def test_an_empty_pool_says_so(self, run, store):
        store.spaces = []
        assert run("store", "ls").stdout == "the pool is empty\n"
        assert json.loads(run("store", "ls", "--json").stdout) == []


class TestClear:
    def test_it_asks_and_goes_on_after_yes(self, run, store):
        result = run("store", "clear", input="y\n")
        assert "Remove 200 pages (2.0 GiB) of org/[large], org/small in /dev/shm/pool?" in result.stderr
        assert (result.exit_code, result.stdout, store.cleared) == (0, "removed 200 pages\n", [None])

    @pytest.mark.parametrize("answer", ["n\n", "\n", ""], ids=["no", "nothing", "end of input"])
    def test_without_a_yes_nothing_is_forgotten(self, run, store, answer):
        result = run("store", "clear", input=answer)
        assert (result.exit_code, result.stdout, store.cleared) == (1, "", [])
        assert "nothing was done" in result.stderr

    def test_yes_can_be_said_before(self, run, store):
        result = run("store", "clear", "--yes", "--json", input="")
        assert (json.loads(result.stdout), result.stderr) == ({"cleared_pages": 200, "users": []}, "")

    def test_one_namespace_is_named_by_the_beginning_of_its_id(self, run, store):
        run("store", "clear", "--yes", "--namespace", SMALL.digest.hex()[:8].upper())
        assert store.cleared == [SMALL.digest]

    @pytest.mark.parametrize("beginning", ["zz", ""])
    def test_an_id_that_does_not_name_one_namespace_is_an_error_that_lists_them(self, run, store, beginning):
        result = run("store", "clear", "--yes", "--namespace", beginning)
        assert (result.exit_code, store.cleared) == (1, [])
        assert f"{SMALL.digest.hex()[:8]} (org/small)" in result.stderr

    @pytest.mark.parametrize("arguments", [[], ["--namespace", "zz"]], ids=["question", "error"])
    def test_a_stored_name_forges_no_line_and_steers_no_terminal(self, run, store, arguments):
        name = namespace("org/x\n\x1b[2Kerror: none")
        store.spaces = [SpaceInfo(name, Shard(0, 30, 0, 4), pages=1, nbytes=1, oldest_s=1.0, idle_s=1.0)]
        result = run("store", "clear", *arguments, input="n\n")
        assert r"org/x\n\x1b[2Kerror: none" in result.stderr and "\x1b" not in result.stderr
        assert [line for line in result.stderr.splitlines() if line.startswith("error: none")] == []

    def test_the_question_about_one_namespace_counts_only_its_pages(self, run):
        result = run("store", "clear", "-n", SMALL.digest.hex(), input="n\n")
        assert "Remove 10 pages (10.0 MiB) of org/small in" in result.stderr


class TestVerify:
    def test_sound_pages_exit_with_0(self, run):
        result = run("store", "verify")
        assert (result.exit_code, result.output) == (0, "all 200 pages (2.0 GiB) are intact\n")

    def test_a_terminal_sees_a_bar_that_counts_pages(self, run, monkeypatch):
        screen = Console(force_terminal=True, file=io.StringIO(), width=100)
        monkeypatch.setattr(store_, "error_console", lambda: screen)
        assert run("store", "verify").stdout == "all 200 pages (2.0 GiB) are intact\n"
        assert "200/200" in screen.file.getvalue()

    def test_damaged_pages_exit_with_3(self, run, store):
        store.report = VerifyReport(pages=200, nbytes=2 * GIB, corrupt=2)
        result = run("store", "verify")
        assert (result.exit_code, result.stdout) == (3, "2 of 200 pages were corrupt and have been removed\n")

    def test_json_is_the_report_alone(self, run, store):
        store.report = VerifyReport(pages=200, nbytes=2 * GIB, corrupt=2)
        result = run("store", "verify", "--json")
        assert (result.exit_code, json.loads(result.stdout)) == (3, {"pages": 200, "nbytes": 2 * GIB, "corrupt": 2})


class TestDestroy:
    def test_it_asks_and_deletes_the_folder(self, run, pool):
        result = run("store", "destroy", input="y\n")
        assert f"Delete the pool {pool}" in result.stderr
        assert (result.exit_code, pool.exists()) == (0, False)

    def test_without_a_yes_the_folder_stays(self, run, pool):
        assert (run("store", "destroy", input="n\n").exit_code, pool.exists()) == (1, True)

    def test_json_says_what_was_freed(self, run, pool):
        (pool / DATA).mkdir()
        (pool / DATA / "arena").write_bytes(b"x" * 8192)
        result = run("store", "destroy", "--yes", "--json")
        assert json.loads(result.stdout)["pool"] == str(pool)
        assert json.loads(result.stdout)["freed_nbytes"] >= 8192

    def test_what_the_pool_did_not_make_stays(self, run, pool):
        (pool / "photos").mkdir()
        (pool / "photos" / "table").write_text("set for four")
        result = run("store", "destroy", "--yes")
        assert (result.exit_code, [path.name for path in pool.iterdir()]) == (1, ["photos"])
        assert "is deleted, the folder is not: it also holds photos, which the pool did not make" in result.stderr
        assert (pool / "photos" / "table").exists()

    def test_a_pool_json_of_somebody_else_makes_no_pool(self, run, tmp_path):
        club = tmp_path / "club"
        club.mkdir()
        (club / "pool.json").write_text('{"length_m": 25}')
        assert run("store", "destroy", "--yes", "--pool", str(club)).exit_code == 1
        assert (club / "pool.json").exists()

    def test_a_folder_that_is_no_pool_is_not_deleted(self, run, tmp_path):
        other = tmp_path / "photos"
        other.mkdir()
        result = run("store", "destroy", "--yes", "--pool", str(other))
        assert (result.exit_code, other.exists()) == (1, True)
        assert f"pool folder {other} is not a pool" in result.stderr

    def test_a_link_to_a_pool_is_not_followed(self, run, pool, tmp_path):
        link = tmp_path / "link"
        link.symlink_to(pool)
        result = run("store", "destroy", "--yes", "--pool", str(link))
        assert (result.exit_code, pool.exists()) == (1, True)
        assert "is a symbolic link" in result.stderr


class TestErrors:
    def test_a_pool_that_is_not_there_is_named_with_what_to_do(self, run, tmp_path):
        result = run("store", "stats", "--pool", str(tmp_path / "absent"))
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: pool folder {tmp_path / 'absent'} does not exist: ")
        assert "--pool or MOONCAKE_CONNECTOR_POOL" in result.stderr

    def test_looking_creates_no_pool(self, run, tmp_path):
        run("store", "stats", "--pool", str(tmp_path / "absent"))
        assert not (tmp_path / "absent").exists()

    def test_with_nothing_configured_the_pool_is_where_engines_put_it(self, run, pool, monkeypatch):
        monkeypatch.delenv("MOONCAKE_CONNECTOR_POOL")
        monkeypatch.setattr(pool_, "default_pool_path", lambda: pool)
        assert run("store", "stats").exit_code == 0

    def test_a_default_pool_that_found_no_room_in_shared_memory_is_found(self, run, pool, monkeypatch):
        monkeypatch.delenv("MOONCAKE_CONNECTOR_POOL")
        monkeypatch.setattr(pool_, "default_pool_path", lambda: pool.parent / "shm" / pool.name)
        monkeypatch.setattr(pool_.tempfile, "gettempdir", lambda: str(pool.parent))
        assert run("store", "stats").exit_code == 0

    def test_a_relative_pool_is_taken_from_the_working_folder(self, run, pool, monkeypatch):
        monkeypatch.chdir(pool.parent)
        assert run("store", "stats", "--pool", "pool").exit_code == 0

    def test_a_pool_that_cannot_be_opened_is_one_line(self, run, monkeypatch):
        def refuse(folder, *, rebuild):
            raise PoolError(f"pool folder {folder} belongs to user 7")

        monkeypatch.setattr(pool_, "EmbeddedStore", refuse)
        result = run("store", "stats")
        assert result.exit_code == 1
        assert re.fullmatch(r"error: pool folder \S+ belongs to user 7\n", result.stderr)

    @pytest.mark.parametrize("command", ["stats", "ls", "clear", "verify", "destroy"])
    def test_an_empty_pool_option_is_wrong_usage_and_not_the_current_folder(self, run, pool, monkeypatch, command):
        monkeypatch.chdir(pool)
        result = run("store", command, "--pool", "")
        assert (result.exit_code, result.stdout) == (2, "") and "empty" in result.stderr and pool.exists()

    @pytest.mark.parametrize("command", [["stats"], ["ls"], ["clear", "--yes"], ["verify"], ["destroy", "--yes"]])
    def test_an_error_is_json_where_json_was_asked_for(self, run, tmp_path, command):
        result = run("store", *command, "--json", "--pool", str(tmp_path / "absent"))
        assert result.exit_code == 1 and result.stderr.startswith("error: pool folder ")
        assert json.loads(result.stdout)["error"] == result.stderr.removeprefix("error: ").rstrip()

    def test_so_is_an_answer_that_was_no_yes(self, run):
        result = run("store", "clear", "--json", input="n\n")
        assert result.exit_code == 1 and "nothing was done" in json.loads(result.stdout)["error"]

    def test_so_is_an_error_that_nobody_expected(self, run, store, monkeypatch):
        monkeypatch.setattr(store, "stats", lambda: {}["gone"])
        result = run("store", "stats", "--json")
        assert result.exit_code == 1 and "KeyError" in json.loads(result.stdout)["error"]
        assert "Traceback" not in result.output

    def test_a_question_that_nobody_can_answer_is_no(self, tmp_path):
        command = "import sys; from pathlib import Path; from store_client import EmbeddedStore\n"
        subprocess.run([sys.executable, "-c", f"{command}EmbeddedStore(Path(sys.argv[1]), 1 << 20)", tmp_path / "p"])
        shell = f"{sys.executable} -m mooncake_connector.cli.entry store clear --pool {tmp_path / 'p'} <&-"
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
        assert done.returncode == 1 and "nothing was done; answer y, or use --yes" in done.stderr
