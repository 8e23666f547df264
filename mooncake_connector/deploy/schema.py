"""What a deployment file holds. docs/deployment.md and docs/deployment.schema.json are generated from it."""

from __future__ import annotations

import ipaddress
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake_connector.config.values import decode as decode_setting

PREFILL_PORT, DECODE_PORT = 8100, 8200
PEER_PORT_OFFSET = 10_000
"""What is added to the port of a prefill instance for the one at which decode instances find it."""
MAX_INSTANCES = 64
MAX_PORT = 65535 - PEER_PORT_OFFSET


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
        int, _field("How many there are.", f"an integer from 1 to {MAX_INSTANCES}", ge=1, le=MAX_INSTANCES)
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
    devices: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        _field(
            "GPUs, as in `CUDA_VISIBLE_DEVICES`: the first `tp` of them are for the first instance, and so on. Unset: "
            "every instance sees what `up` sees, which only works where there is one GPU for each, or none at all.",
            "a list of `count` times `tp` integers from 0, or an empty one",
        ),
    ] = ()
    flags: Annotated[
        Arguments,
        _field("Further flags of the engine for this role, after those for both.", "text as in a shell"),
    ] = Arguments()
    env: Annotated[
        Environment,
        _field(
            "Variables of the environment for this role; they win over those for both.", "names with text or numbers"
        ),
    ] = Environment()


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """What stands before the instances."""

    kind: Annotated[
        Literal["builtin", "vllm-router", "sglang-router", "none"],
        _field(
            "`builtin` is a small proxy that comes with this package. `vllm-router` and `sglang-router` are the "
            "packages of these names, each for its engine, to be installed beside it. With `none` the instances run "
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
        Literal["round_robin", "least_loaded"],
        _field(
            "How `builtin` chooses an instance: in turn, or the one with the fewest requests under way. The policy of "
            "the others is one of their flags.",
            '"round_robin" or "least_loaded"',
        ),
    ] = "round_robin"
    flags: Annotated[Arguments, _field("Further flags of `vllm-router` or `sglang-router`.", "text as in a shell")] = (
        Arguments()
    )


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
        _field("Further flags of the engine, such as `--max-model-len 8192`, for both roles.", "text as in a shell"),
    ] = Arguments()
    env: Annotated[
        Environment,
        _field("Variables of the environment for both roles, added to that of `up`.", "names with text or numbers"),
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


def decode(wanted: type, value: Any) -> Any:
    """msgspec's hook for the types that it does not know; raises ValueError for what is not allowed."""
    if wanted is Address:
        return Address(ipaddress.ip_address(value if isinstance(value, str) else ""))
    if wanted is Arguments:
        if not isinstance(value, str) or "\0" in value:
            raise ValueError("expected text")
        return Arguments(shlex.split(value))
    if wanted is Environment:
        texts = msgspec.convert(value, dict[str, str | int | float])
        if any(not name or "=" in name or "\0" in f"{name}{text}" for name, text in texts.items()):
            raise ValueError("a name that no variable can have")
        return Environment({name: str(text) for name, text in texts.items()})
    return decode_setting(wanted, value, strict=True)


def folder_of(text: str, file: Path) -> Path:
    """`text` as a path, from the folder of the deployment file on."""
    return (file.parent / os.path.expanduser(text)).absolute()  # `~nobody` stays, and no such folder is found


def is_folder(model: str) -> bool:
    """Whether a model is named by its folder, not by its name on the hub."""
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..")


def meta_of(field: msgspec.structs.FieldInfo) -> Meta:
    """Description and `extra` ("allowed") of one field."""
    meta = field.type.__metadata__[0]
    assert isinstance(meta, Meta)
    return meta
