"""Configuration of transfers between instances: lists, addresses, and what must hold between fields."""

from pathlib import Path

import pytest

from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import ConfigError
from transfer.transports.rdma.settings import RdmaSettings

TLS = {"tls_certificate": "/etc/kv/me.pem", "tls_key": "/etc/kv/me.key", "tls_authority": "/etc/kv/ca.pem"}


def environ(**fields: str) -> dict[str, str]:
    return {f"MOONCAKE_CONNECTOR_{name.upper()}": text for name, text in fields.items()}


def refusal(engine_json: dict[str, object], variables: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(engine_json, variables or {})
    return str(caught.value)


def test_with_nothing_set_transfers_stay_on_this_machine_and_no_port_is_opened():
    config = load_config({}, {})
    assert config.prefix_reuse is True
    assert config.transports == ("cuda_ipc", "cma", "shm", "tcp")
    assert (config.transfer_hosts, config.transfer_port) == ((), 0)
    assert config.secret_file is config.tls_certificate is config.tls_key is config.tls_authority is None
    bounds = (config.granularity, config.granularity_chunk_tokens, config.granularity_layer_tokens)
    assert bounds == ("auto", 512, 4096)
    assert (config.transfer_deadline_s, config.transfer_lease_s, config.transfer_failure) == (120, 30, "recompute")


def test_lists_come_from_json_files_and_variables(tmp_path):
    (tmp_path / "config.toml").write_text('transports = ["tcp", "cma"]\n')
    config = load_config(
        {"transfer_hosts": ["127.0.0.2", "::1"], "secret_file": "/etc/kv/secret"},
        {"MOONCAKE_CONNECTOR_CONFIG": str(tmp_path / "config.toml")},
    )
    assert (config.transports, config.transfer_hosts) == (("tcp", "cma"), ("127.0.0.2", "::1"))
    config = load_config({}, environ(transports="tcp, shm", transfer_hosts="127.0.0.1", secret_file="/etc/kv/secret"))
    assert (config.transports, config.transfer_hosts) == (("tcp", "shm"), ("127.0.0.1",))


def test_a_list_in_the_engines_json_is_a_list():
    assert "transports in the engine's JSON is 'tcp,shm': expected a list" in refusal({"transports": "tcp,shm"})


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "localhost", "node-7", "10.0.0.1:80", "10.0.0.0/8", ""],
)
def test_a_host_is_the_address_of_a_machine(host):
    message = refusal({"transfer_hosts": ["127.0.0.1", host]})
    assert "literal IP addresses" in message and repr(host) in message


@pytest.mark.parametrize("hosts", [["127.0.0.1", "127.0.0.1"], [f"127.0.0.{n}" for n in range(1, 18)], "127.0.0.1"])
def test_hosts_are_up_to_sixteen_different_ones(hosts):
    assert load_config({"transfer_hosts": []}, {}).transfer_hosts == ()
    assert "up to 16 different" in refusal({"transfer_hosts": hosts})


@pytest.mark.parametrize("host", ["10.0.0.1", "192.168.1.7", "2001:db8::7", "fe80::1%eth0", "::ffff:10.0.0.1", "::1"])
def test_an_address_needs_a_secret_also_on_the_loopback_that_every_user_reaches(host):
    hosts = ["127.0.0.1", host]
    message = refusal({"transfer_hosts": hosts})
    assert f"transfer_hosts in the engine's JSON has 127.0.0.1, {host}" in message
    assert "secret_file by default is null: set secret_file" in message
    config = load_config({"transfer_hosts": hosts, "secret_file": "/etc/kv/secret"}, {})
    assert (config.transfer_hosts, config.secret_file) == (tuple(hosts), Path("/etc/kv/secret"))


@pytest.mark.parametrize("missing", TLS)
def test_tls_has_all_three_paths_or_none(missing):
    assert load_config(TLS, {}).tls_key == Path("/etc/kv/me.key")
    for given in ({key: path for key, path in TLS.items() if key != missing}, {missing: TLS[missing]}):
        message = refusal(given)
        assert "expected all three for TLS, or none" in message
        for key in TLS:
            seen = repr(TLS[key]) if key in given else "null"
            assert f"{key} in the engine's JSON is {seen}" in message or f"{key} by default is {seen}" in message


def test_granularity_bounds_ascend_whichever_sources_they_come_from():
    assert load_config({"granularity_chunk_tokens": 4096}, {}).granularity_chunk_tokens == 4096
    message = refusal({"granularity_chunk_tokens": 1000}, environ(granularity_layer_tokens="999"))
    assert "granularity_chunk_tokens in the engine's JSON is 1000 and environment variable " in message
    assert "MOONCAKE_CONNECTOR_GRANULARITY_LAYER_TOKENS is 999: expected the first to be at most the second" in message
    assert "granularity_layer_tokens by default is 4096" in refusal({"granularity_chunk_tokens": 4097})


def test_rdma_chooses_ports_and_addresses_itself_unless_they_are_named():
    config = load_config({}, {})
    assert (config.rdma_ports, config.rdma_gid_index) == ((), None)
    named = {"rdma_ports": ["mlx5_0", "mlx5_bond_0:2"], "rdma_gid_index": 3, "rdma_traffic_class": 104}
    settings = RdmaSettings.configured(load_config(named, {}))
    assert settings == RdmaSettings(("mlx5_0", "mlx5_bond_0:2"), 3, 104, 0, 0, 7, 5.0)
    assert load_config({}, environ(rdma_ports="mlx5_0,mlx5_1:1")).rdma_ports == ("mlx5_0", "mlx5_1:1")


@pytest.mark.parametrize(
    "field, value",
    [
        ("rdma_ports", ["mlx5_0", "mlx5_0"]), ("rdma_ports", ["mlx5_0:0"]), ("rdma_ports", ["a/b"]),
        ("rdma_ports", [f"mlx5_{n}" for n in range(9)]), ("rdma_gid_index", 256), ("rdma_gid_index", -1),
        ("rdma_traffic_class", 256), ("rdma_service_level", 16), ("rdma_pkey_index", -1), ("rdma_retries", 0),
        ("rdma_retries", 8), ("rdma_lost_after_s", 0.001), ("rdma_lost_after_s", 61),
    ],
)  # fmt: skip
def test_what_no_card_can_be_set_to_is_refused(field, value):
    assert f"{field} in the engine's JSON" in refusal({field: value})
