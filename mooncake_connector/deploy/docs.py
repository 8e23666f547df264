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
from mooncake_connector.config.tiers import KINDS, MAX_TIERS, Tiers
from mooncake_connector.config.values import Hosts, IpAddress, Nbytes, PageTokens, RdmaPorts, Transports
from mooncake_connector.deploy.schema import Address, Arguments, Deployment, Environment, meta_of

_TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_OF: dict[Any, dict[str, Any]] = {
    Path: {"type": "string"},
    Address: {"type": "string"},
    Arguments: {"type": "string"},
    Environment: {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
        "additionalProperties": {"type": ["string", "number"]},
    },
    Nbytes: {"type": ["integer", "string"]},
    PageTokens: {"enum": [16, 32, 64, 128, 256, 512, 1024]},
    Transports: {**_TEXTS, "minItems": 1, "uniqueItems": True},
    Hosts: {**_TEXTS, "uniqueItems": True},
    RdmaPorts: {**_TEXTS, "uniqueItems": True},
    IpAddress: {"type": "string"},
    Tiers: {
        "type": "array",
        "maxItems": MAX_TIERS,
        "items": {
            "anyOf": [
                {"enum": list(KINDS)},
                {"type": "object", "properties": {"kind": {"enum": list(KINDS)}}, "required": ["kind"]},
            ]
        },
    },
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
- `--print` prints each command as a person would type it, values of `env` included as they are: what nobody may read
  (a token of the hub, say) belongs into the environment of `up`, which every process inherits and nothing prints.
  `--render` prints a [file for Compose or Kubernetes](#compose-and-kubernetes), which has nothing of the environment of
  `up`: for that, name such a variable in `env`, with any value that is not empty.
- Then the instances are started, and when all of them answer, the router. When it answers too, its URL is printed, and
  a `curl` to try. On a terminal a table stays live: state, requests under way, waiting and done, hit rate (prompt
  tokens that an instance did not compute, from whatever cache or instance they came), and KV sent and fetched between
  instances. Elsewhere there is a line for each thing that happens.
- Each process has a log in the folder `logs`. It grows without bound; it is only ever appended to, so `logrotate` with
  `copytruncate` may cut it.
- An instance that ends before it was ready ends everything, with the end of its log. Later a process that ends is
  restarted after 2, 4 and 8 seconds; after the fourth time it is given up. One that answered for ten minutes begins to
  count anew; a restart that hangs until `start_deadline_s` counts too. Others go on, unless it was the router or the
  last one of a role that is needed: decode, and in SGLang prefill. An instance that runs but does not answer `/health`
  for `silence_deadline_s` is killed, and counts as one that has ended.
- Ctrl-C or SIGTERM stops everything, a second one at once. No process stays, also where `up` itself is killed.

### Routers
`builtin` answers `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health` and `/metrics`, and streams. It
needs httpx and uvicorn, which both engines bring along. It sends a request to instances that answer `/health`, and to
another one as long as nothing was answered; after three failures in a row (10 s each for `/health`) an instance is
asked nothing until it is well again. An answer that has begun cannot be asked for again: where its instance dies, or
is silent for `silence_deadline_s`, the client's connection is closed without the end of the answer. A client that
leaves takes its request away from both instances. Where no prefill instance is left, vLLM's decode instances compute
prompts themselves; SGLang's cannot, so the answer is what the last one answered, or 503 where none did. An answer that
takes longer than an hour to begin, or between two pieces, is given up (504 where nothing came) and not asked for
again.

It has no authentication of its own; an `Authorization` header is passed on, also with `/abort_request`, by which
SGLang's instances hear that a client has left. With `--admin-api-key` they take that only from clients that use that
key: for all others a request whose client has left may be computed to its end. The same holds for several samples of a
prompt (`n` above 1), which SGLang names itself.

Several prompts in one request of vLLM's sequential order are computed by the decode instance: prefill answers with the
parameters of the first alone. In the concurrent order, and in SGLang, each is handed over.

### The policy conductor
`router.policy: conductor` sends a prompt where most of it is cached, unless too much else is going on there. The score
of an instance is

    cache_weight * cached / prompt - request_weight * requests - prefill_weight * prefill

- **cached / prompt**: the part of the prompt that the instance has in its cache, from 0 to 1.
- **requests**: how many more requests it has under way than the one with the fewest, as a multiple of what that one
  has, at least of 16.
- **prefill**: how many more tokens it has still to compute than the one with the fewest, as a multiple of this
  prompt's tokens, or of the mean of all where that is more. A prompt counts, less what is cached of it, until its
  instance answers: with a stream until the first piece, else until the end.

The best gets it, and of equal ones the one whose turn it is; with `candidates` above 1 one of so many of the best.
With the default weights a prompt waits for what is cached as long as computing that twice would take, and an instance
that has a prefix that everybody asks for gets at most twice 16 requests, or twice the requests of the least loaded,
more than that one: then others get some, and have the prefix as well. The form is known from public gateways beside
Mooncake's Conductor (aigw's `inference_lb`, with weights 2, 1 and 3); the units of the loads are our own.
[benchmarks.md](benchmarks.md#routing) has what it is worth. Instances of one host that share a pool find nearly the
same there wherever a prompt goes.

Where there are prefill instances, they are chosen so, and decode instances by their requests alone. Decode instances
that compute prompts themselves are chosen so as well.

What is cached is an estimate by default: the router keeps for each instance hashes of the last 16,384 chunks (512
bytes of text, or 128 token ids) that it sent there, and nobody is asked. It does not see what an instance has evicted,
what it has computed for other routers, nor that it was restarted; a wrong guess costs one prefill, after which it is
right. With `conductor.index` an index is asked: the prompt is tokenized by `/tokenize` of the least loaded instance,
unless it came as token ids, and `/query` of the index says how many tokens each instance has, in any medium
(`longest_matched`, of the tenant `default`). Prompts of several in one request are sent by load. An index that does
not answer within `index_deadline_s`, that cannot be reached, refuses, or answers nonsense costs what it would have
told: the request goes by load. The first of each such cause is logged, and after three in a row the index is not asked
for 5 s.

What is in the engines' own memory an index learns from their KV events. One `--kv-events-config` in `flags`, as JSON
or in vLLM with dots (`--kv-events-config.publisher zmq`), is enough for all instances: of the ports at which it has
them publish and replay (`tcp://*:PORT`; each data-parallel rank takes the next), each further instance gets the next
that no other has; in pods all have those of the first. The router registers with the index who publishes, each rank by
itself, by the first name in `/v1/models`, and again every 10 s, since an index that was started anew knows nobody.
What a former deployment registered by that URL with another endpoint or model is replaced; what you registered without
an endpoint stays as it is.
`up --check` names instances that it cannot register, and why. Those with an API key, which do not tell it their
model's name, the router's log names; these, and who does not publish, are registered by you.

    flags: >-
      --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq",
                           "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
    connector:
      agent_http_port: 7787
    router:
      policy: conductor
      conductor: {index: 'http://127.0.0.1:7787'}

`vllm-router` and `sglang-router` are packages of others, which are started with `--prefill` and `--decode` and what
they need for this connector. They are looked for beside the Python that runs `mooncake-connector`, then on the PATH: an
environment of their own will do (`python -m venv routers && routers/bin/pip install sglang-router`, and
`PATH=$PATH:$PWD/routers/bin mooncake-connector up ...`). They look at their instances once a minute, and may ask one
that was restarted only minutes later; `--health-check-interval-secs` in `router.flags` changes that.

Run with real engines, on the CPU: vLLM 1P1D with `builtin`, vLLM 2P1D with `builtin` in both orders and with
`vllm-router`, two instances of vLLM without prefill with the policy `conductor`, by its history and by the agent's
index, SGLang 1P1D with `builtin` and with `sglang-router`.

### Compose and Kubernetes
`--render` prints the same deployment for other systems, with the commands of `up`, and starts nothing. Its first lines
say what to do before: build the image (the engine's own and the wheel), make the Secret.

- `--render compose`, for one host: a container for each process. All of them share network, /dev/shm and processes with
  a container `pod`, so ports, pool and transports are those of `up`, and `devices` chooses GPUs. Compose restarts what
  ends, but nothing for being unhealthy; after a reboot `docker compose up -d` starts all of it again.
- `--render k8s`: a StatefulSet and a headless Service for each role, whose pods the router is told by name, a
  Deployment for the router, and a Service for clients.
- `--render rbg`: the same as a RoleBasedGroup (`workloads.x-k8s.io/v1alpha2`), and that Service.

In pods `transports` is `tcp`, `transfer_hosts` the pod's address, `secret_file` a file of the Secret, and all
instances of a role have the port of the first; what the file says of these, and `devices`, is for this machine alone,
as are `logs` and `start_at_once`. In all containers `capacity` is 4 GiB where it is not set, and `/dev/shm` has room
for it and 2 GiB for each engine. Startup probes give an instance `start_deadline_s`, and liveness probes end one that
has not answered for `silence_deadline_s`, in steps of 20 s; a router that is not `builtin` starts when all instances
answer. A pod that comes back has another address: routers look its name up again, and the decode instances ask anew for
each request.

Values of variables and flags whose names end in `key`, `token`, `secret`, `password`, `passwd`, `passphrase`, `pass`,
`pwd` or `credential`, in the plural or with a number as well, are not printed: they are taken from the Secret, or from
the environment of `docker compose`, by the names that the first lines say. A name with two values stands for the first;
the other's has the role at its end, as in `API_KEY_DECODE`. All else in `env` and `flags` is printed as it is, numbers
of `tokens` too.

**KV on GPUs does not travel between pods yet** (see [disaggregation.md](disaggregation.md#limits)): there vLLM's decode
pods compute every prompt, and SGLang's requests fail. For GPUs of one host there is `--render compose`. What is
printed is validated against published schemas in the tests; no cluster and no Docker has run it yet.

### SGLang and the pool
SGLang instances hand KV over without the pool. For the pool as well, add to `prefill.flags`, or to `decode.flags` where
`prefill.count` is 0:
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
