"""What is run for a deployment: the command and the environment of each process, as a person would type them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_connector.config.schema import environ_name
from mooncake_connector.deploy.schema import (
    DECODE_PORT,
    PEER_PORT_OFFSET,
    PREFILL_PORT,
    Deployment,
    Instances,
    folder_of,
    is_folder,
)

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a process that listens everywhere is reached from here."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a deployment.

    Args:
        name: "prefill-0", "router", ...
        role: "prefill", "decode" or "router".
        env: what is added to the environment.
        url: where its API is reached from this machine.
        listens: (host, port) of every TCP port that is known to be taken by it.
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    url: str
    listens: tuple[tuple[str, int], ...]
    peer_port: int = 0
    """Of a prefill instance: where decode instances look for it; 0 where nobody has to know."""
    peer_host: str = ""
    """The address there, where it is not that of this machine's own processes."""


def commands(deployment: Deployment, file: Path) -> list[Command]:
    """Instances first, the router last. `file` is the deployment file, from whose folder on paths are read."""
    model = str(folder_of(deployment.model, file)) if is_folder(deployment.model) else deployment.model
    prefills = [_instance(deployment, "prefill", number, model) for number in range(deployment.prefill.count)]
    decodes = [_instance(deployment, "decode", number, model) for number in range(deployment.decode.count)]
    return [*prefills, *decodes, *_router(deployment, prefills, decodes)]


def typed(command: Command) -> str:
    """The command for a shell, its variables before it, an option a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    lines = [" ".join([*words, shlex.quote(command.arguments[0])])]
    for argument in command.arguments[1:]:
        if argument.startswith("--"):
            lines.append(f"    {argument}")
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)


def settings_environ(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of mooncake-connector as variables."""
    return {environ_name(name): _text(value) for name, value in settings.items() if value != []}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, list) else str(value)


def _instance(deployment: Deployment, role: str, number: int, model: str) -> Command:
    instances: Instances = getattr(deployment, role)
    port = (instances.port or (PREFILL_PORT if role == "prefill" else DECODE_PORT)) + number
    settings = dict(deployment.connector)
    peer_host = ""
    peer_port = port + PEER_PORT_OFFSET if role == "prefill" else 0
    listens = [(deployment.host, port)]
    if deployment.engine == "vllm":
        arguments = _vllm(deployment, role, instances, port, model)
        if deployment.router.order == "concurrent" and peer_port:
            settings["transfer_port"] = peer_port
            peer_host = next(iter(settings.get("transfer_hosts", ())), "")
            listens += [(host, peer_port) for host in settings.get("transfer_hosts", ())[:1]]
        else:
            peer_port = 0
    else:
        arguments = _sglang(deployment, role, instances, port, model, peer_port)
        listens += [(deployment.host, peer_port)] if peer_port else []
    env = settings_environ(settings)
    if instances.devices:
        mine = instances.devices[number * instances.tp : (number + 1) * instances.tp]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
    return Command(
        f"{role}-{number}",
        role,
        (sys.executable, "-m", *arguments, *deployment.flags, *instances.flags),
        {**env, **deployment.env, **instances.env},
        url_of(deployment.host, port),
        tuple(listens),
        peer_port,
        peer_host,
    )


def _vllm(deployment: Deployment, role: str, instances: Instances, port: int, model: str) -> list[str]:
    transfer = {
        "kv_connector": "MooncakeKVConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": deployment.connector.get("transfer_failure", "recompute"),
    }
    return [
        "vllm.entrypoints.openai.api_server",  # the `vllm` command of the CPU build does not start
        *("--model", model, "--host", deployment.host, "--port", str(port)),
        *(("--tensor-parallel-size", str(instances.tp)) if instances.tp > 1 else ()),
        *("--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))),
    ]


def _sglang(
    deployment: Deployment, role: str, instances: Instances, port: int, model: str, bootstrap_port: int
) -> list[str]:
    return [
        "sglang.launch_server",
        *("--model-path", model, "--host", deployment.host, "--port", str(port)),
        *(("--tp-size", str(instances.tp)) if instances.tp > 1 else ()),
        *("--page-size", str(deployment.connector.get("page_tokens", 64)), "--enable-metrics"),
        *("--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake_connector"),
        *(("--disaggregation-bootstrap-port", str(bootstrap_port)) if bootstrap_port else ()),
    ]


def _router(deployment: Deployment, prefills: list[Command], decodes: list[Command]) -> Iterator[Command]:
    router = deployment.router
    if router.kind == "none":
        return
    listens = ("--host", router.host, "--port", str(router.port))
    targets = [argument for one in decodes for argument in ("--decode", one.url)]
    if router.kind == "builtin":
        before = (sys.executable, "-m", "mooncake_connector.deploy.proxy", "--engine", deployment.engine)
        order = ("--order", router.order) if deployment.engine == "vllm" else ()
        arguments = [*before, *listens, *order, "--policy", router.policy.replace("_", "-")]
        arguments += [
            word for one in prefills for word in ("--prefill", f"{one.url},{one.peer_port},{one.peer_host}".rstrip(","))
        ]
    else:
        arguments = [installed(router.kind) or router.kind]
        if router.kind == "vllm-router":
            # Its default policy, cache_aware, sends each request twice (seen in 0.1.17).
            arguments += [*listens, "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        else:
            arguments += ["launch", *listens, "--pd-disaggregation"]
        ports = [str(one.peer_port) if deployment.engine == "sglang" else "none" for one in prefills]
        arguments += [word for one, port in zip(prefills, ports, strict=True) for word in ("--prefill", one.url, port)]
    yield Command(
        "router",
        "router",
        (*arguments, *targets, *router.flags),
        {},
        url_of(router.host, router.port),
        ((router.host, router.port),),
    )


def installed(program: str) -> str | None:
    """Where a program is: beside this Python, or on the PATH."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)


def url_of(host: str, port: int) -> str:
    reached = ANY.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_name_on_the_hub(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None
