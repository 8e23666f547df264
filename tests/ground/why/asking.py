"""`mooncake-connector why` as a person asks it, and what it says of a prompt of ten pages."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from store_client import Put, Space
from store_client.testing import put_chain

SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
WHOLE = Shard(0, 2, 0, 2)
TOKENS = list(range(1000, 1000 + 640))
"""Ten pages."""
CAPACITY = 8 << 20
KEYS = page_keys(TOKENS, 64)


def stored(space: Space, keys: list[bytes], nbytes: int = 4096) -> None:
    assert put_chain(space, keys, nbytes) == [Put.STORED] * len(keys)


def ask(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["why", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def asked_json(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(*arguments, "--json"))
    return found


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["why", *map(str, arguments)])
    assert result.exit_code != 0
    return result.output


def runs(found: dict[str, Any], group: int = 0) -> list[tuple[int, int, str]]:
    return [(run["first"], run["last"], run.get("cause", run["what"])) for run in found["groups"][group]["runs"]]
