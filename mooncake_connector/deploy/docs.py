"""Prints docs/deployment.md from the schema: `python -m mooncake_connector.deploy.docs > docs/deployment.md`.

The JSON Schema beside it is what `mooncake-connector up --schema` prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from mooncake_connector.config.schema import Config
from mooncake_connector.config.values import Hosts, Nbytes, PageTokens, Transports
from mooncake_connector.deploy.schema import Address, Arguments, Deployment, Environment, meta_of

_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_OF: dict[Any, dict[str, Any]] = {
    Path: {"type": "string"},
    Address: {"type": "string"},
    Arguments: {"type": "string"},
    Environment: {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    Nbytes: {"type": ["integer", "string"]},
    PageTokens: {"enum": [16, 32, 64, 128, 256, 512, 1024]},
    Transports: {**_TEXTS, "minItems": 1, "uniqueItems": True},
    Hosts: {**_TEXTS, "uniqueItems": True},
}


def json_schema() -> dict[str, Any]:
    """For editors: keys, types, bounds and descriptions; what must hold between keys is checked by `up` alone."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A deployment of mooncake-connector",
        **_object(Deployment),
    }


def _object(kind: type[msgspec.Struct], leave_out: str = "") -> dict[str, Any]:
    fields = [field for field in msgspec.structs.fields(kind) if field.name != leave_out]
    return {
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        "required": [field.name for field in fields if field.required],
        "additionalProperties": False,
    }


def _property(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    meta = meta_of(field)
    if inner := _struct_in(field):
        return {"description": meta.description, **_object(inner)}
    if field.name == "connector":
        return {"description": meta.description, **_object(Config, leave_out="transfer_port")}
    found = msgspec.json.schema(field.type, schema_hook=lambda kind: dict(_OF[kind]))
    return {**found, "description": f"{meta.description} Allowed: {_allowed(meta)}."}


def _struct_in(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    inner = get_args(field.type)[0]
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def _allowed(meta: msgspec.Meta) -> str:
    return str((meta.extra or {})["allowed"])


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


_USE = """\
- It looks at everything first, and starts nothing where something fails: the engine and its version, our plugin in it,
  the model, ports, memory, room for the pool, what transfers need (secret, certificates, permission for `cma`), the
  router's package, the folder for logs. `--check` does only that; exit code 1 means that something fails.
- `--print` prints each command as a person would type it.
- Then the instances are started, and when all of them answer, the router. When it answers too, its URL is printed, and
  a `curl` to try. On a terminal a table stays live: state, requests under way, waiting and done, hit rate (prompt
  tokens that an instance did not compute, from whatever cache or instance they came), and KV sent and fetched between
  instances. Elsewhere there is a line for each thing that happens.
- Each process has a log in the folder `logs`.
- An instance that ends before it was ready ends everything, with the end of its log. Later a process that ends is
  restarted after 2, 4 and 8 seconds; after the fourth time within ten minutes it is given up. Others go on, unless it
  was the router or the last one of a role that is needed: decode, and in SGLang prefill.
- Ctrl-C or SIGTERM stops everything, a second one at once. No process stays, also where `up` itself is killed.

### Routers
`builtin` answers `/v1/completions`, `/v1/chat/completions`, `/v1/models` and `/health`, and streams. It needs httpx and
uvicorn, which both engines bring along. It sends a request to instances that answer `/health`, and to another one as
long as nothing was answered. A client that leaves takes its request away from both instances. Where no prefill instance
is left, vLLM's decode instances compute prompts themselves; SGLang's cannot, so the answer is 503. It has no
authentication of its own; an `Authorization` header is passed on. Before SGLang it refuses `n` above 1, all of which
SGLang would give one `bootstrap_room`.

`vllm-router` and `sglang-router` are packages of others (`pip install vllm-router`), which are started with `--prefill`
and `--decode` and what they need for this connector.

### SGLang and the pool
SGLang instances hand KV over without the pool. For the pool as well, add to `prefill.flags`:
`--enable-hierarchical-cache --hicache-storage-backend mooncake_connector`.

"""
_HEAD = """\
<!-- Generated by `python -m mooncake_connector.deploy.docs`; change mooncake_connector/deploy/schema.py instead. -->

# One file, one command

`mooncake-connector up deployment.yaml` runs prefill and decode instances of one engine, and a router before them, on
this machine:

```yaml
engine: vllm
model: /models/Qwen3-8B
flags: --max-model-len 8192
prefill:
  count: 2
  devices: [0, 1]
decode:
  devices: [2, 3]
  tp: 2
connector:
  capacity: 32GiB
router:
  port: 8000
```

Run it with the Python of the engine's environment.

%s## The file
YAML of at most 64 KiB, without anchors. What is wrong in it is named with the line, the key, the value and what is
allowed. `mooncake-connector up --schema` prints a JSON Schema of it, which is also
[deployment.schema.json](deployment.schema.json): put `# yaml-language-server: $schema=PATH` into the first line, and
editors complete and check.

"""


def render() -> str:
    """The whole page as Markdown, ending in one newline."""
    return _HEAD % _USE + "\n".join(_lines(Deployment, "")) + "\n"


def _lines(kind: type[msgspec.Struct], place: str) -> Iterator[str]:
    done: list[type[msgspec.Struct]] = []
    for field in msgspec.structs.fields(kind):
        meta = meta_of(field)
        inner = _struct_in(field)
        if inner is None:
            yield f"- **`{place}{field.name}`**: {meta.description} Allowed: {_allowed(meta)}. {_default(field)}"
        elif inner not in done:
            done.append(inner)
            names = [one.name for one in msgspec.structs.fields(kind) if _struct_in(one) is inner]
            yield f"- {' and '.join(f'**`{name}`**' for name in names)}:"
            yield from (f"  {line}" for line in _lines(inner, ""))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "It must be given."
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "Default: null."
    return "Default: none." if isinstance(value, tuple | dict) else f"Default: `{value}`."


if __name__ == "__main__":
    print(render(), end="")
