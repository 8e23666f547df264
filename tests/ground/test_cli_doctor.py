"""`mooncake-connector doctor`: its lines, its exit code, and what it finds out about configuration and pool."""

from __future__ import annotations

import ctypes.util
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import certificates
import pytest
from store.pools import data_folder, edit
from typer.testing import CliRunner

import mooncake_connector.cli.doctor
import vllm_plugin.doctor
from mooncake_connector.checks import failed, ok, warning
from mooncake_connector.cli import doctor_rdma, doctor_transfers
from mooncake_connector.cli.main import app
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain
from transfer.transports import registry
from transfer.transports.rdma import abi, opened, verbs
from transfer.transports.registry import Transports
from transfer.transports.unix import listen_at_port

MIB = 1 << 20
INSTALLED = {engine: importlib.util.find_spec(engine) for engine in ("vllm", "sglang") if sys.modules.get(engine, 1)}


@pytest.fixture(autouse=True)
def pool(tmp_path, monkeypatch) -> Path:
    """The configured pool folder, which does not exist yet."""
    folder = tmp_path / "pool"
    monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(folder))
    monkeypatch.setenv("MOONCAKE_CONNECTOR_CAPACITY", "32MiB")
    monkeypatch.setattr(mooncake_connector.cli.doctor, "transfer_checks", lambda config: iter(()))
    return folder


@pytest.fixture
def engine(monkeypatch):
    """Set what the adapter's checks of its engine come to."""

    def engine(*found):
        monkeypatch.setattr(vllm_plugin.doctor, "run", lambda: iter(found))

    engine(ok("vLLM", "1.0"))
    return engine


def doctor(*arguments: str):
    return CliRunner().invoke(app, ["doctor", *(arguments or ("vllm",))])


def outcome_of(name: str) -> tuple[str, str]:
    """Status and detail of one check."""
    report = json.loads(doctor("vllm", "--json").stdout)
    (found,) = [check for check in report["checks"] if check["name"] == name]
    return found["status"], found["detail"]


def assert_outcome(name: str, status: str, *told: str) -> None:
    found, detail = outcome_of(name)
    assert found == status and [text for text in told if text not in detail] == [], (found, detail)


class TestWhatAPersonSees:
    def test_one_line_a_check_and_how_to_start(self, engine):
        engine(ok("vLLM", "1.0"), warning("plugin", "hm"))
        result = doctor()
        assert result.exit_code == 0
        lines = [line.split()[:2] for line in result.stdout.splitlines()[:3]]
        assert lines == [["ok", "vLLM"], ["warning", "plugin"], ["ok", "configuration"]]
        assert result.stdout.endswith(f"start it with:\n\n{vllm_plugin.doctor.START}\n")

    def test_each_line_is_there_before_the_next_check_begins(self, monkeypatch):
        printed = []
        monkeypatch.setattr(mooncake_connector.cli.doctor, "print_check", printed.append)

        def run():
            yield ok("vLLM", "1.0")
            assert [check.name for check in printed] == ["vLLM"]
            yield ok("plugin", "fine")
            assert [check.name for check in printed] == ["vLLM", "plugin"]

        monkeypatch.setattr(vllm_plugin.doctor, "run", run)
        assert doctor().exit_code == 0 and len(printed) > 2

    def test_a_check_that_breaks_down_is_one_that_failed(self, monkeypatch):
        def run():
            yield ok("vLLM", "1.0")
            raise OSError("no such engine")

        monkeypatch.setattr(vllm_plugin.doctor, "run", run)
        result = doctor("vllm", "--json")
        assert result.exit_code == 1
        assert "OSError: no such engine" in json.loads(result.stdout)["checks"][1]["detail"]

    def test_what_will_not_work_is_exit_code_1_and_no_advice_to_start(self, engine):
        engine(ok("vLLM", "1.0"), failed("plugin", "lost"))
        result = doctor()
        assert result.exit_code == 1
        assert "failed  plugin        lost" in result.stdout.splitlines() and "start it" not in result.stdout

    @pytest.mark.parametrize("last, healthy", [(warning("plugin", "hm"), True), (failed("plugin", "lost"), False)])
    def test_json_has_the_same(self, engine, last, healthy):
        engine(ok("vLLM", "1.0"), last)
        result = doctor("vllm", "--json")
        report = json.loads(result.stdout)
        assert (report["engine"], report["ok"], result.exit_code) == ("vllm", healthy, 0 if healthy else 1)
        assert report["checks"][1] == {"name": "plugin", "status": last.status.value, "detail": last.detail}

    def test_what_an_engine_prints_while_it_is_imported_stays_off_stdout(self, monkeypatch):
        def run():
            print("noise")
            yield ok("vLLM", "1.0")

        monkeypatch.setattr(vllm_plugin.doctor, "run", run)
        assert json.loads(doctor("vllm", "--json").stdout)["ok"] is True

    @pytest.mark.parametrize("engine_name", ["vllm", "sglang"])
    def test_an_engine_that_is_not_installed_is_told(self, engine_name):
        if INSTALLED.get(engine_name):
            pytest.skip(f"{engine_name} is installed here")
        result = doctor(engine_name)
        assert result.exit_code == 1
        assert f"not installed in {sys.prefix}" in result.stdout.splitlines()[0]


@pytest.mark.usefixtures("engine")
class TestConfiguration:
    def test_what_differs_from_the_defaults_is_named(self, pool):
        status, detail = outcome_of("configuration")
        assert status == "ok" and f"pool = {pool}" in detail and "page_tokens" not in detail

    def test_tiers_and_lists_are_words(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TIERS", '[{"kind":"disk","path":"/a","capacity":"1GiB"}, "mooncake"]')
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSPORTS", "shm,tcp")
        status, detail = outcome_of("configuration")
        assert status == "ok" and detail.endswith("capacity = 32.0 MiB; tiers = disk, mooncake; transports = shm, tcp")

    def test_one_that_cannot_be_used_is_told(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_PAGE_TOKENS", "63")
        assert_outcome("configuration", "failed", "MOONCAKE_CONNECTOR_PAGE_TOKENS is '63'")


@pytest.mark.usefixtures("engine")
class TestThePool:
    @pytest.mark.parametrize("what", ["made", "filled"], ids=["missing", "empty"])
    def test_one_that_is_missing_or_empty_will_be_made_and_is_not_made_now(self, pool, what):
        if what == "filled":
            pool.mkdir(mode=0o700)
        assert outcome_of("pool") == ("ok", f"{pool} will be {what} by the first engine, with 32.0 MiB")
        assert pool.exists() == (what == "filled") and not list(pool.glob("*"))

    def test_one_that_exists_is_opened(self, pool):
        EmbeddedStore(pool, 16 * MIB).close()
        assert outcome_of("pool") == ("ok", f"{pool}, 0 B of 16.0 MiB used by 0 pages")

    def test_one_that_no_folder_can_hold_is_refused(self, pool, monkeypatch):
        pool.write_text("a file")
        assert_outcome("pool", "failed", str(pool))
        monkeypatch.setenv("MOONCAKE_CONNECTOR_POOL", str(pool / "below"))
        assert_outcome("pool", "failed", "cannot be created", str(pool))

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_capacity_without_room_is_refused(self, pool, monkeypatch, exists):
        if exists:
            EmbeddedStore(pool, 16 * MIB).close()
        monkeypatch.setenv("MOONCAKE_CONNECTOR_CAPACITY", "1000TiB")
        assert_outcome("pool", "failed", "set a smaller `capacity`")

    @pytest.mark.parametrize(
        "damage, status, told",
        [
            ("mode", "failed", "chmod 700"),
            ("format", "failed", "format 99, written by a newer mooncake-connector"),
            ("boot", "warning", "rebuilt, empty, by the next engine: the machine was restarted"),
            ("table", "warning", "rebuilt, empty, by the next engine: table has 0 bytes"),
        ],
    )
    def test_one_that_cannot_be_used_as_it_is_is_told_and_not_made_anew_now(self, pool, damage, status, told):
        EmbeddedStore(pool, 16 * MIB).close()
        if damage == "mode":
            pool.chmod(0o755)
        elif damage == "format":
            edit(pool, format=99)
        elif damage == "boot":
            edit(pool, boot_id="another boot")
        else:
            (data_folder(pool) / "table").write_bytes(b"")
        before = (pool / "pool.json").read_text()
        assert_outcome("pool", status, told)
        assert (pool / "pool.json").read_text() == before

    def test_a_memory_limit_is_held_against_what_it_may_take_besides_what_it_has(self, pool, monkeypatch):
        monkeypatch.setattr(mooncake_connector.cli.doctor, "left_for", lambda path: 16 * MIB)
        assert_outcome("memory limit", "warning", "leave this process 16.0 MiB", "may grow by")
        with EmbeddedStore(pool, 32 * MIB) as store:
            monkeypatch.delenv("MOONCAKE_CONNECTOR_CAPACITY")  # the pool keeps its own
            assert_outcome("memory limit", "warning", "may grow by 32.0 MiB")
            put_chain(store.space(namespace(), SHARD), chain("a", 24), MIB)
        assert_outcome("memory limit", "ok", "leave this process 16.0 MiB")

    def test_its_room_is_that_of_its_file_system(self, pool):
        status, detail = outcome_of("room")
        assert status == "ok" and detail.endswith(f"free in {pool.parent}")

    def test_too_little_shared_memory_is_a_warning_that_names_the_other_folder(self, monkeypatch, tmp_path):
        monkeypatch.delenv("MOONCAKE_CONNECTOR_POOL")
        notice = "/dev/shm has 64 MiB free: using another folder"
        chosen = tmp_path / "another", notice
        monkeypatch.setattr("mooncake_connector.cli.doctor.choose_default", lambda capacity: chosen)
        assert outcome_of("shared memory") == ("warning", notice)
        assert outcome_of("pool")[1].startswith(str(tmp_path / "another"))


@pytest.mark.usefixtures("engine")
class TestTransfers:
    @pytest.fixture(autouse=True)
    def looked_at(self, pool, monkeypatch):
        monkeypatch.setattr(mooncake_connector.cli.doctor, "transfer_checks", doctor_transfers.transfer_checks)
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSPORTS", "shm,tcp")

    @pytest.fixture
    def secret(self, monkeypatch, tmp_path):
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(b"x" * 32)
        monkeypatch.setenv("MOONCAKE_CONNECTOR_SECRET_FILE", str(secret))
        return secret

    def test_with_nothing_set_it_says_that_no_port_is_opened(self):
        status, detail = outcome_of("transfers")
        assert status == "ok" and detail.startswith(f"Unix sockets for processes of user {os.geteuid()} on this host;")
        assert "no TCP port" in detail
        names = [check["name"] for check in json.loads(doctor("vllm", "--json").stdout)["checks"]]
        assert "shm" in names and not {"tcp", "transfer_port"} & set(names)

    def test_it_says_which_ports_are_opened_where(self, monkeypatch, secret):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_HOSTS", "127.0.0.1,127.0.0.2")
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_PORT", "7123")
        status, detail = outcome_of("transfers")
        assert status == "ok" and detail.startswith("TCP at 127.0.0.1, 127.0.0.2 (secret): port 7123 to be asked at")

    def test_a_port_that_is_taken_is_a_warning(self, monkeypatch):
        listener, port = listen_at_port(0, 1)
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_PORT", str(port))
        with listener:
            status, detail = outcome_of("transfer_port")
        assert status == "warning" and detail.startswith(f"{port} cannot be taken now")
        assert outcome_of("transfer_port") == ("ok", f"{port} is free")

    def test_a_user_that_stands_for_all_unknown_ones_is_told(self, monkeypatch):
        monkeypatch.setattr("transfer.transports.unix._unknown_user", os.geteuid)
        monkeypatch.setattr("transfer.transports.unix._knows_every_user", lambda: False)
        assert_outcome("transfers", "failed", "run as another user, or set transfer_hosts and secret_file")

    def test_each_transport_is_tried_with_another_process(self, monkeypatch, secret):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_HOSTS", "127.0.0.1")
        for name in ("shm", "tcp"):
            assert_outcome(name, "ok", "reaches other processes")

    def test_tcp_is_tried_at_the_configured_addresses_with_certificates(self, monkeypatch, secret, tmp_path):
        reached = []
        connect = Transports.connect
        monkeypatch.setattr(
            Transports, "connect", lambda self, found, **more: reached.append(found) or connect(self, found, **more)
        )
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSPORTS", "tcp")
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_HOSTS", "127.0.0.2,127.0.0.3")
        if certificates.CAN_MAKE:
            for role, path in certificates.make_certificate(tmp_path).items():
                monkeypatch.setenv(f"MOONCAKE_CONNECTOR_TLS_{role.upper()}", path)
        status, detail = outcome_of("tcp")
        assert status == "ok" and detail.endswith("at 127.0.0.2, 127.0.0.3")
        assert b"127.0.0.2" in reached[0]["tcp"] and b"127.0.0.3" in reached[0]["tcp"]

    @pytest.mark.skipif(not certificates.CAN_MAKE, reason="it takes certificates")
    def test_what_auto_leaves_out_where_there_are_certificates_is_not_tried(self, monkeypatch, secret, tmp_path):
        monkeypatch.setattr(registry, "rails", lambda: [SimpleNamespace(is_up=True)])
        monkeypatch.setattr(doctor_transfers, "_reaches_neighbour", lambda name, options: ok(name, "tried"))
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSPORTS", "auto")
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_HOSTS", "127.0.0.1")
        assert outcome_of("rdma") == ("ok", "tried")
        for role, path in certificates.make_certificate(tmp_path).items():
            monkeypatch.setenv(f"MOONCAKE_CONNECTOR_TLS_{role.upper()}", path)
        assert outcome_of("tcp") == ("ok", "tried")
        with pytest.raises(ValueError):
            outcome_of("rdma")

    @pytest.mark.parametrize(
        "neighbour, told",
        [("exec sleep 600", "the other process did not answer"), ("exit 0", "does not work here")],
        ids=["says nothing", "ends"],
    )
    def test_a_neighbour_that_does_not_answer_is_given_up(self, monkeypatch, tmp_path, neighbour, told):
        other = tmp_path / "python"
        other.write_text(f"#!/bin/sh\n{neighbour}\n")
        other.chmod(0o700)
        monkeypatch.setattr(doctor_transfers.sys, "executable", str(other))
        monkeypatch.setattr(doctor_transfers, "_PATIENCE_S", 0.3 if "sleep" in neighbour else 60.0)
        assert_outcome("shm", "warning", told)

    def test_a_secret_that_others_may_read_is_told(self, secret):
        secret.chmod(0o644)
        assert_outcome("transfers", "failed", str(secret))

    def test_an_address_of_another_machine_is_told(self, monkeypatch, secret):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_TRANSFER_HOSTS", "192.0.2.3")
        assert_outcome("transfers", "failed", "192.0.2.3, where nobody can listen here")

    def test_without_prefix_reuse_nobody_looks_at_the_pool(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_CONNECTOR_PREFIX_REUSE", "0")
        report = json.loads(doctor("vllm", "--json").stdout)
        assert not {"pool", "room"} & {check["name"] for check in report["checks"]}


@pytest.mark.parametrize("lacks", ["library", "card"])
def test_rdma_says_what_is_missing_and_how_to_get_it(monkeypatch, lacks):
    monkeypatch.setattr(doctor_rdma, "rails", list)
    monkeypatch.setattr(opened, "rails", list)
    verbs.library.cache_clear()
    if lacks == "library":
        monkeypatch.setattr(abi, "LIBRARY", "libibverbs-that-is-not-there.so.1")
    elif ctypes.util.find_library("ibverbs") is None:
        pytest.skip("needs libibverbs: apt-get install libibverbs1")
    result = CliRunner().invoke(app, ["doctor", "rdma", "--json"])
    told = json.loads(result.stdout)
    checks = {check["name"]: (check["status"], check["detail"]) for check in told["checks"]}
    assert result.exit_code == 1 and told["transport"] == "rdma" and not told["ok"]
    assert checks["cards"][0] == checks["rdma"][0] == "failed" and "/sys/class/infiniband" in checks["cards"][1]
    assert checks["addresses"][0] == "warning"
    if lacks == "library":
        status, detail = checks["library"]
        assert status == "failed" and "cannot be loaded" in detail and "apt-get install libibverbs1" in detail
    else:
        assert checks["library"][0] == "ok" and "/libibverbs.so.1" in checks["library"][1]
        assert "there is no RDMA card" in checks["rdma"][1]
