"""`mooncake-connector store purge` and `store clear --tiers`: pages of the tiers, by hand."""

import json
import os
import time

import pytest
from tiers.s3_servers import environment, opened, settings
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.config.tiers import FolderTier
from store_client import EmbeddedStore, Put
from store_client.agent.forget import marks
from store_client.embedded.folder import is_pool
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain
from store_client.tiers.base import Purged, SpaceName
from store_client.tiers.folder import SharedFolder
from store_client.tiers.testing import DEADLINE_S, Memory, contains, new_space, write

MODEL = namespace("org/model")
SPACE = SpaceName(MODEL.digest, SHARD)
KEYS = chain("a", 4)
HOUR_S = 3600.0


@pytest.fixture
def tiers(tmp_path, files, monkeypatch):
    """An object store and a folder, configured, with four pages of a namespace and two of another, half of them old."""
    environment(monkeypatch)
    pool = tmp_path / "pool"
    with EmbeddedStore(pool, 16 << 20) as store:
        assert put_chain(store.space(MODEL, SHARD), KEYS) == [Put.STORED] * 4
    secret = tmp_path / "secret"
    secret.write_text("a secret of sixteen bytes and more")
    secret.chmod(0o600)
    of_object, folder = settings(files.port, url="s3://pages/purged"), tmp_path / "folder"
    folder.mkdir(mode=0o700)
    listed = [
        {"kind": "object", "url": of_object.url, "endpoint": of_object.endpoint},
        {"kind": "folder", "name": "nfs", "path": str(folder)},
    ]
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(pool))
    monkeypatch.setenv("MOONCAKE_CONNECTOR_SECRET_FILE", str(secret))
    monkeypatch.setenv("MOONCAKE_CONNECTOR_TIERS", json.dumps(listed))
    found = {"object": opened(files.port, url=of_object.url), "nfs": SharedFolder(FolderTier(path=folder))}
    memory, other = Memory(), new_space()
    for tier in found.values():
        tier.clear(None, deadline_s=DEADLINE_S)
        write(tier, memory, SPACE, KEYS)
        write(tier, memory, other, KEYS[:2], 2 * PAGE_NBYTES)
    for root in (folder, files.bucket / "purged"):
        for path in root.rglob("*"):
            if path.is_file() and path.name.startswith((KEYS[0].hex(), KEYS[1].hex())):
                os.utime(path, (time.time() - 5 * HOUR_S,) * 2)
    yield found, other
    for tier in found.values():
        tier.close()


@pytest.fixture
def purge(tiers):
    """What the command prints as JSON for each tier."""

    def run(*arguments):
        result = CliRunner().invoke(app, ["store", "purge", *map(str, arguments), "--yes", "--json"])
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        return {name: Purged(one["purged_pages"], one["purged_nbytes"]) for name, one in told.items()}

    return run


def both(pages: int, page_nbytes: int = PAGE_NBYTES) -> dict[str, Purged]:
    return dict.fromkeys(("object", "nfs"), Purged(pages, pages * page_nbytes))


def test_by_age_namespace_and_size(tiers, purge):
    found, other = tiers
    assert purge("--older-than", "6h") == both(0)
    assert purge("--older-than", "4.5h", "--namespace", MODEL.digest.hex()[:8]) == both(2)
    for tier in found.values():
        assert contains(tier, SPACE, KEYS) == [False, False, True, True]
    assert purge("--larger-than", PAGE_NBYTES, "--namespace", MODEL.digest.hex()) == both(0)
    assert purge("--larger-than", "64KiB", "--older-than", "270m") == both(2, 2 * PAGE_NBYTES)
    assert purge("--namespace", other.namespace.hex()) == both(0), "the pool need not know it"
    assert purge() == both(2)


def test_one_tier(tiers, purge):
    found, _ = tiers
    assert list(purge("--tier", "nfs")) == ["nfs"]
    assert contains(found["nfs"], SPACE, KEYS) == [False] * 4 and contains(found["object"], SPACE, KEYS) == [True] * 4


def test_people_are_asked_and_told(tiers):
    found, _ = tiers
    refused = CliRunner().invoke(app, ["store", "purge", "--older-than", "4h"], input="n\n")
    question = "Delete pages (older than 4.0 h) of object, nfs, for all hosts that share them? [y/N]"
    assert refused.exit_code == 1 and question in refused.stderr
    assert all(contains(tier, SPACE, KEYS) == [True] * 4 for tier in found.values())
    done = CliRunner().invoke(app, ["store", "purge", "--older-than", "4h"], input="y\n")
    assert done.stdout == "tier object: removed 4 pages (384.0 KiB)\ntier nfs: removed 4 pages (384.0 KiB)\n"


def test_a_tier_that_fails_does_not_stop_the_others(tiers, files, monkeypatch):
    listed = json.loads(os.environ["MOONCAKE_CONNECTOR_TIERS"])
    listed[0]["url"] = "s3://not-there/x"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_TIERS", json.dumps(listed))
    result = CliRunner().invoke(app, ["store", "purge", "--yes", "--json"])
    value = json.loads(result.stdout)
    assert result.exit_code == 1 and "no such bucket" in value["object"]["error"]
    assert value["nfs"] == {"purged_pages": 6, "purged_nbytes": 8 * PAGE_NBYTES}
    spoken = CliRunner().invoke(app, ["store", "purge", "--yes"])
    assert spoken.exit_code == 1 and "no such bucket" in spoken.stderr
    assert spoken.stdout == "tier nfs: removed 0 pages\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tier", "cloud"], 1, "there are object, nfs"),
        (["--older-than", "7"], 2, "expected a number and s, m, h or d"),
        (["--larger-than", "big"], 2, "is no size"),
        (["--namespace", "ffff"], 1, "is no namespace of this pool"),
    ],
)
def test_what_is_mistyped_deletes_nothing(tiers, arguments, code, said):
    found, _ = tiers
    result = CliRunner().invoke(app, ["store", "purge", "--yes", *arguments])
    assert result.exit_code == code and said in " ".join(result.stderr.replace("│", " ").split())
    assert all(contains(tier, SPACE, KEYS) == [True] * 4 for tier in found.values())


def test_without_tiers_there_is_nothing_to_purge(tiers, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONNECTOR_TIERS")
    result = CliRunner().invoke(app, ["store", "purge", "--yes"])
    assert result.exit_code == 1 and "MOONCAKE_CONNECTOR_TIERS" in result.stderr


def test_clear_leaves_the_tiers_alone_or_has_the_agent_clear_them(tiers, tmp_path):
    pool = tmp_path / "pool"
    assert is_pool(pool)
    plain = CliRunner().invoke(app, ["store", "clear", "--yes"])
    assert plain.stdout == "removed 4 pages\n" and marks(pool) == {}
    result = CliRunner().invoke(app, ["store", "clear", "--tiers", "--yes"])
    assert result.stdout == "removed 0 pages\n" and set(marks(pool).values()) == {None}
    assert "when it is started, unless the machine is restarted" in result.stderr
    assert "`mooncake-connector store purge`" in result.stderr
    asked = CliRunner().invoke(app, ["store", "clear", "--tiers"], input="n\n")
    assert "and what the tiers behind it have of them?" in asked.stderr


def test_clear_leaves_a_mark_for_what_a_tier_was_given_before_the_pool_was_clear(tiers, tmp_path, monkeypatch):
    pool, clear = tmp_path / "pool", EmbeddedStore.clear

    def clear_late(store, *arguments):
        seen = marks(pool)
        assert seen, "nothing is fetched while the pool is cleared"
        for name in seen:
            (pool / name).unlink()  # as an agent does that was quick
        return clear(store, *arguments)

    monkeypatch.setattr(EmbeddedStore, "clear", clear_late)
    result = CliRunner().invoke(app, ["store", "clear", "--tiers", "--namespace", MODEL.digest.hex(), "--yes"])
    assert result.stdout == "removed 4 pages\n"
    assert set(marks(pool).values()) == {MODEL.digest}
    assert f"`mooncake-connector store purge --namespace {MODEL.digest.hex()}`" in result.stderr


def test_an_agent_that_runs_has_the_tiers_forget_at_once(tiers, tmp_path):
    found, other = tiers
    runner = CliRunner()
    started = runner.invoke(app, ["agent", "--json"])
    assert started.exit_code == 0, started.output
    try:
        result = runner.invoke(app, ["store", "clear", "--tiers", "--namespace", MODEL.digest.hex(), "--yes"])
        assert result.stdout == "removed 4 pages\n" and "no agent" not in result.stderr
        deadline_s = time.monotonic() + 120
        while marks(tmp_path / "pool") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert marks(tmp_path / "pool") == {}
        for tier in found.values():
            assert contains(tier, SPACE, KEYS) == [False] * 4
            assert contains(tier, other, KEYS[:2], 2 * PAGE_NBYTES) == [True] * 2
    finally:
        runner.invoke(app, ["agent", "--stop"])
