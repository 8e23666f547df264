"""What a deployment file holds. docs/deployment.md and docs/deployment.schema.json are generated from it."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake_connector.config.values import decode as decode_setting
from mooncake_connector.deploy.policies import CACHE_WEIGHT, PREFILL_WEIGHT, REQUEST_WEIGHT

PREFILL_PORT, DECODE_PORT = 8100, 8200
PEER_PORT_OFFSET = 10_000
"""What is added to the port of a prefill instance for the one at which decode instances find it."""
MAX_INSTANCES = 64
SILENCE_DEADLINE_S = 300.0
INDEX_DEADLINE_S = 0.2
MAX_PORT = 65535 - PEER_PORT_OFFSET
_SHELL = "text as in a shell, without comments and without flags that other keys of this file stand for"
_VARIABLES = "names of letters, digits and _, with text or numbers"


def _field(description: str, allowed: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"allowed": allowed}, **bounds)


class Address(str):
    """A literal IP address."""


class Arguments(tuple[str, ...]):
    """Arguments of a command, written as in a shell."""


class Environment(dict[str, str]):
    """Variables of the environment; a number counts as its text."""


class Instances(msgspec.Struct, frozen=True, kw_only=True):
    """The instances of one role."""

    count: Annotated[
        int,
        _field(
            "How many there are. With none for prefill those of decode compute prompts, and nothing is handed over.",
            f"an integer from 1 to {MAX_INSTANCES}, for prefill also 0",
            ge=0,
            le=MAX_INSTANCES,
        ),
    ] = 1
    port: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_PORT)] | None,
        _field(
            f"HTTP port of the first; the others have those that follow. Unset: {PREFILL_PORT} for prefill, "
            f"{DECODE_PORT} for decode. At a prefill instance's port plus {PEER_PORT_OFFSET} decode instances find it: "
            "SGLang's bootstrap port, or `transfer_port` in vLLM with a router of the concurrent order.",
            f"an integer from 1 to {MAX_PORT}; null for the default",
        ),
    ] = None
    tp: Annotated[int, _field("Tensor parallel size of each.", "an integer from 1 to 64", ge=1, le=64)] = 1
    pp: Annotated[
        int,
        _field(
            "Pipeline parallel size of each. SGLang's decode instances are no pipelines.",
            "an integer from 1 to 64; 1 for decode in SGLang",
            ge=1,
            le=64,
        ),
    ] = 1
    devices: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        _field(
            "GPUs, as in `CUDA_VISIBLE_DEVICES`: the first `tp` times `pp` of them are for the first instance, and "
            "so on. Unset: every instance sees what `up` sees, which only works where there is one GPU for each, or "
            "none at all.",
            "a list of `count` times `tp` times `pp` integers from 0, or an empty one",
        ),
    ] = ()
    flags: Annotated[
        Arguments,
        _field("Further flags of the engine for this role, after those for both.", _SHELL),
    ] = Arguments()
    env: Annotated[
        Environment,
        _field("Variables of the environment for this role; they win over those for both.", _VARIABLES),
    ] = Environment()

    @property
    def num_ranks(self) -> int:
        """Of one instance, each of which has a GPU."""
        return self.tp * self.pp


_WEIGHT = "a number from 0 to 100"


class Conductor(msgspec.Struct, frozen=True, kw_only=True):
    """How much each term of the policy `conductor` counts, and where it knows from what is cached."""

    cache_weight: Annotated[
        float,
        _field("Of the part of the prompt that an instance has in its cache.", _WEIGHT, ge=0, le=100),
    ] = CACHE_WEIGHT
    request_weight: Annotated[
        float,
        _field("Of the requests that an instance has under way.", _WEIGHT, ge=0, le=100),
    ] = REQUEST_WEIGHT
    prefill_weight: Annotated[
        float,
        _field("Of the prompt tokens that an instance has still to compute.", _WEIGHT, ge=0, le=100),
    ] = PREFILL_WEIGHT
    candidates: Annotated[
        int,
        _field(
            "Among so many of the best one is drawn. With 1 hits are the most; several routers, which do not see each "
            "other's requests, keep apart with 2 or 3.",
            f"an integer from 1 to {MAX_INSTANCES}",
            ge=1,
            le=MAX_INSTANCES,
        ),
    ] = 1
    index: Annotated[
        Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+$")] | None,
        _field(
            "Where an index listens that speaks the HTTP API of Mooncake's Conductor, in which each instance is "
            "registered with its URL or its `host:port` as `instance_id`; those that publish KV events the router "
            "registers itself. Unset: the router goes by what it has sent where.",
            "a URL of http or https without a path; null for none",
        ),
    ] = None
    index_block_tokens: Annotated[
        int,
        _field("Tokens of a block, as instances are registered there.", "an integer from 1 to 65536", ge=1, le=65536),
    ] = 64
    index_deadline_s: Annotated[
        float,
        _field(
            "How long a request may wait for tokens and for the index; then it goes by load.",
            "a number above 0, at most 10",
            gt=0,
            le=10,
        ),
    ] = INDEX_DEADLINE_S
    index_token_file: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        _field(
            "A file, from the folder of this one on, whose text is sent to the index as a bearer token.",
            "text; null for none",
        ),
    ] = None


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before the instances."""

    kind: Annotated[
        Literal["builtin", "vllm-router", "sglang-router", "none"],
        _field(
            "`builtin` is a small proxy that comes with this package. `vllm-router` and `sglang-router` are the "
            "packages of these names, each for its engine, beside it or on the PATH. With `none` the instances run "
            "for a router of yours.",
            '"builtin", "vllm-router", "sglang-router" or "none"',
        ),
    ] = "builtin"
    host: Annotated[
        Address, _field("Address at which the router listens.", "a literal IP address; 0.0.0.0 for all of IPv4")
    ] = Address("127.0.0.1")
    port: Annotated[int, _field("Port of the router.", "an integer from 1 to 65535", ge=1, le=65535)] = 8000
    order: Annotated[
        Literal["sequential", "concurrent"],
        _field(
            "For vLLM with `builtin`: prefill first and then decode, or both at once, so that KV travels while it is "
            "computed. SGLang is always sent both at once.",
            '"sequential" or "concurrent"',
        ),
    ] = "sequential"
    policy: Annotated[
        Literal["round_robin", "least_loaded", "conductor"],
        _field(
            "How `builtin` chooses an instance: in turn, the one with the fewest requests under way, or by "
            "[what it has cached and has to do](#the-policy-conductor). The others have flags for theirs.",
            '"round_robin", "least_loaded" or "conductor"',
        ),
    ] = "round_robin"
    conductor: Annotated[Conductor, _field("For the policy `conductor`.", "the keys below")] = Conductor()
    flags: Annotated[
        Arguments,
        _field(
            "Further flags of `vllm-router` or `sglang-router`. Their metrics are at port 29000: for a second one on a "
            "machine give `--prometheus-port`.",
            _SHELL,
        ),
    ] = Arguments()


class Render(msgspec.Struct, frozen=True, kw_only=True):
    """What `--render` has to know besides; a run on this machine does not look at it."""

    name: Annotated[
        str,
        _field(
            "What the names of all objects begin with, and what the Secret is called.",
            "a lower-case letter, then up to 39 letters, digits or hyphens, no hyphen at the end",
            pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$",
        ),
    ] = "llm"
    image: Annotated[
        Annotated[str, Meta(pattern=r"^[\w./:@-]{1,512}$")] | None,
        _field(
            "The image, which holds the engine, mooncake-connector, and the router's package where there is one. "
            "Unset: `mooncake-connector-ENGINE:VERSION`; the first lines of what is rendered say how to build it.",
            "the name of an image; null for the default",
        ),
    ] = None
    gpus: Annotated[
        bool,
        _field(
            "Whether instances have GPUs: with `k8s` and `rbg`, `tp` times `pp` of `nvidia.com/gpu` each; with "
            "`compose` all GPUs of the host, of which `devices` chooses.",
            "true or false",
        ),
    ] = True
    claim: Annotated[
        Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")] | None,
        _field(
            "For `k8s` and `rbg`: a PersistentVolumeClaim that has the model's folder, by its last name, or takes what "
            "is downloaded where `model` is a name on the hub. Unset: the folder of each node, and a download for each "
            "pod.",
            "the name of a claim; null for none",
        ),
    ] = None


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment on this machine."""

    engine: Annotated[
        Literal["vllm", "sglang"],
        _field("The engine; it is run by the Python that runs `mooncake-connector`.", '"vllm" or "sglang"'),
    ]
    model: Annotated[
        str,
        _field(
            "The model's folder, absolute or from the folder of this file on, or its name on the hub.",
            "text; a folder begins with /, ./, ../ or ~",
            min_length=1,
            max_length=4096,
        ),
    ]
    flags: Annotated[
        Arguments,
        _field("Further flags of the engine, such as `--max-model-len 8192`, for both roles.", _SHELL),
    ] = Arguments()
    env: Annotated[
        Environment,
        _field("Variables of the environment for both roles, added to that of `up`.", _VARIABLES),
    ] = Environment()
    host: Annotated[
        Address, _field("Address at which the instances listen.", "a literal IP address; 0.0.0.0 for all of IPv4")
    ] = Address("127.0.0.1")
    prefill: Annotated[Instances, _field("The instances that compute prompts.", "the keys below")] = Instances()
    decode: Annotated[Instances, _field("The instances that answer.", "the keys below")] = Instances()
    connector: Annotated[
        dict[str, Any],
        _field(
            "Settings of mooncake-connector for all instances, by the names of "
            "[configuration.md](configuration.md#fields): `pool`, `capacity`, `transports`, `secret_file` and so on.",
            "those settings; `transfer_port` is set by `up`",
        ),
    ] = {}
    router: Annotated[Router, _field("What stands before the instances.", "the keys below")] = Router()
    render: Annotated[Render, _field("What `--render` has to know besides.", "the keys below")] = Render()
    logs: Annotated[
        str,
        _field(
            "Folder for the log of each process, from the folder of this file on. Logs of the run before are replaced.",
            "text",
            min_length=1,
            max_length=4096,
        ),
    ] = "mooncake-logs"
    start_at_once: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _field(
            "How many instances may load their model at the same time. Unset: all.",
            "an integer from 1; null for all",
        ),
    ] = None
    start_deadline_s: Annotated[
        float,
        _field(
            "An instance that does not answer `/health` so many seconds after its start is given up.",
            "a number above 0, at most 86400",
            gt=0,
            le=86400,
        ),
    ] = 900.0
    silence_deadline_s: Annotated[
        float,
        _field(
            "An instance that was ready and has not answered `/health` for so many seconds is killed, and restarted "
            "like one that has died; the same for a router. An answer in which `builtin` has got nothing from its "
            "decode instance for so long is cut off there.",
            "a number from 10 to 86400",
            ge=10,
            le=86400,
        ),
    ] = SILENCE_DEADLINE_S


def decode(wanted: type, value: Any) -> Any:
    """msgspec's hook for the types that it does not know; raises ValueError for what is not allowed."""
    if wanted is Address:
        return Address(ipaddress.ip_address(value if isinstance(value, str) else ""))
    if wanted is Arguments:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError("expected text")
        words = shlex.split(value)
        if any(word.startswith("#") for word in words):
            raise ValueError("a comment, which would become arguments")
        return Arguments(words)
    if wanted is Environment:
        texts = msgspec.convert(value, dict[str, str | int | float])
        if not all(map(is_variable, texts)) or "\0" in "".join(map(str, texts.values())):
            raise ValueError("a name that no variable can have, or a value")
        return Environment({name: str(text) for name, text in texts.items()})
    return decode_setting(wanted, value, strict=True)


def is_variable(name: object) -> bool:
    """Whether a shell takes it as a variable's name."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is not None


def folder_of(text: str, file: Path) -> Path:
    """`text` as a path, from the folder of the deployment file on."""
    # Without `..`, which Kubernetes refuses. `~nobody` stays, and no such folder is found.
    return Path(os.path.abspath(file.parent / os.path.expanduser(text)))


def is_folder(model: str) -> bool:
    """Whether a model is named by its folder, not by its name on the hub."""
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..")


def meta_of(field: msgspec.structs.FieldInfo) -> Meta:
    """Description and `extra` ("allowed") of one field."""
    meta = field.type.__metadata__[0]
    assert isinstance(meta, Meta)
    return meta
