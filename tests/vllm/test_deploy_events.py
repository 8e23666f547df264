"""Where `up` takes an instance to publish its KV events is where vLLM reads from the same flags that it does."""

from __future__ import annotations

import argparse
import json

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mooncake_connector.deploy.events import publishing

ON = {"enable_kv_cache_events": True}
DOTTED = "--kv-events-config.enable_kv_cache_events true"


def read(flags: tuple[str, ...]) -> argparse.Namespace:
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(flags))


@pytest.mark.parametrize("flags", [
    ("--kv-events-config", json.dumps(ON)),
    (f"--kv_events_config={json.dumps({**ON, 'endpoint': 'tcp://*:7000', 'replay_endpoint': 'tcp://*:7010'})}",),
    (*DOTTED.split(), "--kv-events-config.endpoint=tcp://*:7000"),
    (*DOTTED.split(), "--kv-events-config", json.dumps({"endpoint": "tcp://*:1"}), "--data-parallel-size", "2"),
    ("--kv-events-config.enable_kv_cache_events", "True"),
    ("--kv-events-config", json.dumps({"enable_kv_cache_events": "yes"})),
    ("--kv-events-config", json.dumps({"enable_kv_cache_events": 1})),
    ("-dp", "3", "--kv-events-config", json.dumps({**ON, "replay_endpoint": "tcp://*:7000"})),
], ids=" ".join)  # fmt: skip
def test_each_rank_of_two_instances_publishes_where_it_is_registered(flags: tuple[str, ...]) -> None:
    taken = set[int]()
    for made in (publishing("vllm", flags, taken), publishing("vllm", flags, taken)):
        arguments = read(made.flags)
        config: KVEventsConfig = arguments.kv_events_config
        assert config.enable_kv_cache_events and config.publisher == "zmq"
        endpoints = [one for one in (config.endpoint, config.replay_endpoint) if one]
        ranks = range(arguments.data_parallel_size or 1)
        moved = [[ZmqEventPublisher.offset_endpoint_port(one, rank) for one in endpoints] for rank in ranks]
        assert [[f"tcp://*:{port}" for port in ports] for ports in made.ports] == moved
    ports = [port for ranks in made.ports for port in ranks]
    assert len(taken) == 2 * len(ports)


@pytest.mark.parametrize("config", [
    {}, {"publisher": "zmq"}, {**ON, "publisher": "null"}, {"enable_kv_cache_events": "off"},
], ids=json.dumps)  # fmt: skip
def test_where_it_says_that_nothing_is_published_vllm_publishes_nothing(config: dict[str, object]) -> None:
    flags = ("--kv-events-config", json.dumps(config))
    assert publishing("vllm", flags, set()).problem.endswith("publishes nothing")
    found: KVEventsConfig = read(flags).kv_events_config
    assert not found.enable_kv_cache_events or found.publisher == "null"
