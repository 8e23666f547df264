"""Where the settings of a Mooncake client come from: ours, Mooncake's file or variables, defaults."""

import json
import sys

import pytest

from mooncake_connector.config.tiers import MooncakeTier, decode_tiers
from store_client.tiers.base import TierError
from store_client.tiers.mooncake import library
from store_client.tiers.mooncake.settings import client_settings
from store_client.tiers.open import open_tier

MASTER = {"MOONCAKE_MASTER": "10.0.0.1:50051"}


def test_a_master_is_enough_and_makes_a_pure_client():
    found = client_settings(MooncakeTier(master="127.0.0.1:50051"), {})
    assert found.arguments == ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:50051")
    assert found.address == ("127.0.0.1", 50051) and found.tenant is None


def test_who_has_mooncakes_variables_sets_nothing_else():
    (tier,) = decode_tiers(["mooncake"], strict=True)
    environ = {
        **MASTER, "MOONCAKE_TE_META_DATA_SERVER": "http://10.0.0.1:8080/metadata", "MOONCAKE_PROTOCOL": "RDMA",
        "MOONCAKE_DEVICE": "mlx5_0", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "4GB", "MOONCAKE_LOCAL_BUFFER_SIZE": "33554432",
        "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.7", "MOONCAKE_TENANT_ID": "chat",
    }  # fmt: skip
    found = client_settings(tier, environ)
    expected = ("10.0.0.7", environ["MOONCAKE_TE_META_DATA_SERVER"], 4 << 30, 32 << 20, "rdma", "mlx5_0")
    assert found.arguments == (*expected, "10.0.0.1:50051")
    assert found.tenant == "chat"
    assert "MC_FORCE_TCP" not in found.variables()


def test_the_file_replaces_the_variables_as_in_mooncake(tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_address": "10.0.0.2:1", "global_segment_size": "1.5 gb"}))
    environ = {**MASTER, "MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_CONFIG_PATH": str(file)}
    found = client_settings(MooncakeTier(), environ)
    assert (found.master, found.protocol, found.segment_nbytes) == ("10.0.0.2:1", "tcp", 3 << 29)


def test_what_is_set_here_wins(tmp_path):
    file = tmp_path / "mooncake.json"
    file.write_text(json.dumps({"master_server_address": "10.0.0.2:1", "protocol": "rdma", "local_buffer_size": 1}))
    tier = MooncakeTier(master="10.0.0.3:1", protocol="tcp", buffer=1 << 20, segment=0, device="", host="h", tenant="t")
    found = client_settings(tier, {"MOONCAKE_CONFIG_PATH": str(file)})
    assert found.arguments == ("h", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", "10.0.0.3:1")
    assert found.variables()["MC_FORCE_TCP"] == "1"


def test_elected_masters_have_no_address_and_may_have_a_cluster_id():
    found = client_settings(MooncakeTier(master="etcd://10.0.0.1:2379;10.0.0.2:2379", cluster_id="blue"), {})
    assert found.address is None
    assert found.variables()["MC_STORE_CLUSTER_ID"] == "blue"


@pytest.mark.parametrize(
    ("timeout_s", "stall", "rpc_ms"), [(5.0, "2", "2500"), (0.1, "1", "200"), (600.0, "3", "30000")]
)
def test_the_library_gives_up_before_the_call_must_end(timeout_s, stall, rpc_ms):
    """A stalled transfer never for longer than 3 s: see MAX_BUFFERS."""
    variables = client_settings(MooncakeTier(timeout_s=timeout_s), MASTER).variables()
    assert (variables["MC_TCP_PROGRESS_TIMEOUT_SEC"], variables["MC_TCP_STATUS_TIMEOUT_SEC"]) == (stall, stall)
    assert variables["MC_RPC_TIMEOUT_MS"] == variables["MC_RPC_CONNECT_TIMEOUT_MS"] == rpc_ms


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "no master is named: set `master: HOST:PORT`, or MOONCAKE_MASTER or MOONCAKE_CONFIG_PATH"),
        ({**MASTER, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "50%"}, "segment is '50%': expected a size such as 4GB"),
        ({"MOONCAKE_CONFIG_PATH": "/nowhere/mooncake.json"}, "the file /nowhere/mooncake.json .* cannot be"),
        ({"MOONCAKE_MASTER": "10.0.0.1"}, "master is '10.0.0.1': expected HOST:PORT, or etcd://HOST:PORT"),
        ({"MOONCAKE_MASTER": "10.0.0.1:5o051"}, "master is '10.0.0.1:5o051': expected HOST:PORT"),
        ({"MOONCAKE_MASTER": "10.0.0.1:50051,10.0.0.2:50051"}, "expected HOST:PORT, or etcd://HOST:PORT;HOST:PORT"),
    ],
)
def test_what_cannot_be_used_is_said_and_lasts(environ, words):
    with pytest.raises(TierError, match=words) as caught:
        client_settings(MooncakeTier(), environ)
    assert caught.value.lasting and "tier mooncake (mooncake)" in str(caught.value)


@pytest.mark.parametrize("name", ["MOONCAKE_MASTER", "MOONCAKE_TE_META_DATA_SERVER"])
def test_a_password_in_an_address_is_refused_and_not_repeated(name):
    """It would be in the log, and in the arguments of the process that tries a client."""
    with pytest.raises(TierError, match="has an @, and is not shown here") as caught:
        client_settings(MooncakeTier(), {**MASTER, name: "etcd://root:hush@10.0.0.1:2379"})
    assert caught.value.lasting and "hush" not in str(caught.value)


@pytest.mark.parametrize("content", ["[]", "{", "1"])
def test_a_file_that_is_no_object_is_refused(tmp_path, content):
    file = tmp_path / "mooncake.json"
    file.write_text(content)
    with pytest.raises(TierError, match="MOONCAKE_CONFIG_PATH"):
        client_settings(MooncakeTier(), {"MOONCAKE_CONFIG_PATH": str(file)})


def test_a_wheel_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(TierError, match=r"pip install 'mooncake-connector\[mooncake\]'") as caught:
        open_tier(MooncakeTier(master="127.0.0.1:1"), b"")
    assert caught.value.lasting


def test_a_system_library_that_is_missing_is_named(monkeypatch):
    def fail(name):
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(library, "import_module", fail)
    with pytest.raises(TierError, match="apt-get install libibverbs1 "):
        open_tier(MooncakeTier(master="127.0.0.1:1"), b"")
