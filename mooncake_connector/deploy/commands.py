"""What is run for a deployment: the command and the environment of each process, as a person would type them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.deploy.events import publishing
from mooncake_connector.deploy.schema import (
    DECODE_PORT,
    PEER_PORT_OFFSET,
    PREFILL_PORT,
    Deployment,
    Instances,
    Router,
    folder_of,
    is_folder,
)

ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a process that listens everywhere is reached from here."""


PROMETHEUS_PORT = 29000
"""At which sglang-router and vllm-router have their metrics."""
_VLLM = ("vllm.entrypoints.openai.api_server", "--model")  # the `vllm` command of the CPU build does not start
_SGLANG = ("sglang.launch_server", "--model-path")


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
    events: tuple[tuple[str, ...], ...] = ()
    """Where KV events of each data-parallel rank are heard, and replayed if they are; none where none are published."""
    unheard: str = ""
    """Why its KV events are not heard, though its flags speak of them; empty where they are, or there are none."""
    ready_path: str = "/health"
    """What answers with success once it can do its work; `/health` is asked after that."""


def commands(
    deployment: Deployment, file: Path, *, hosts: str = "", environ: Mapping[str, str] = os.environ
) -> list[Command]:
    """Instances first, the router last.

    Args:
        file: the deployment file, from whose folder on paths are read.
        hosts: names of the hosts of instances, with {role} and {number}, where each has one of its own. All of a role
            have the same ports then.
        environ: what processes inherit.
    """
    model = str(folder_of(deployment.model, file)) if is_folder(deployment.model) else deployment.model
    taken = set[int]()
    prefills, decodes = (
        [
            _instance(deployment, role, number, model, hosts.format(role=role, number=number), environ, taken)
            for number in range(getattr(deployment, role).count)
        ]
        for role in ("prefill", "decode")
    )
    return [*prefills, *decodes, *_router(deployment, file, prefills, decodes)]


def typed(command: Command) -> str:
    """The command for a shell, its variables before it, an option a line."""
    words = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    lines = [" ".join([*words, shlex.quote(command.arguments[0])])]
    for argument in command.arguments[1:]:
        if argument.startswith("--"):
            lines.append(f"    {shlex.quote(argument)}")
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return " \\\n".join(lines)


def settings_environ(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings of mooncake-connector as variables."""
    return {environ_name(name): _text(value) for name, value in settings.items() if value != []}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, list) else str(value)


def _instance(
    deployment: Deployment, role: str, number: int, model: str, own_host: str, environ: Mapping[str, str],
    taken: set[int],
) -> Command:  # fmt: skip
    """`taken`: ports of instances before it at which they publish."""
    instances: Instances = getattr(deployment, role)
    port = (instances.port or (PREFILL_PORT if role == "prefill" else DECODE_PORT)) + (0 if own_host else number)
    is_vllm = deployment.engine == "vllm"
    is_looked_for = role == "prefill" and (not is_vllm or deployment.router.order == "concurrent")
    peer_port = port + PEER_PORT_OFFSET if is_looked_for else 0
    env = _environ(deployment, instances, number, {"transfer_port": peer_port} if is_vllm and peer_port else {})
    config = load_config(None, {**environ, **env})
    peer_hosts = config.transfer_hosts[:1] if is_vllm else (deployment.host,)
    arguments = [*_VLLM] if is_vllm else [*_SGLANG]
    arguments += [model, "--host", deployment.host, "--port", str(port)]
    if instances.tp > 1:
        arguments += ["--tensor-parallel-size" if is_vllm else "--tp-size", str(instances.tp)]
    if instances.pp > 1:
        arguments += ["--pipeline-parallel-size" if is_vllm else "--pp-size", str(instances.pp)]
    role_of_kv = role if deployment.prefill.count else "both"
    arguments += _vllm(role_of_kv, config) if is_vllm else _sglang(role_of_kv, config, peer_port)
    publishes = publishing(deployment.engine, (*deployment.flags, *instances.flags), set() if own_host else taken)
    url = url_of(own_host or deployment.host, port)
    reached = url.removeprefix("http").rpartition(":")[0]
    return Command(
        f"{role}-{number}",
        role,
        (sys.executable, "-m", *arguments, *publishes.flags),
        env,
        url,
        (
            (deployment.host, port),
            *((host, peer_port) for host in peer_hosts if peer_port),
            *(("0.0.0.0", one) for ports in publishes.ports for one in ports),
        ),
        peer_port,
        own_host or next(iter(peer_hosts), "") if is_vllm and peer_port else "",
        tuple(tuple(f"tcp{reached}:{one}" for one in ports) for ports in publishes.ports),
        publishes.problem,
    )


def _environ(deployment: Deployment, instances: Instances, number: int, more: Mapping[str, Any]) -> dict[str, str]:
    """What is added for one instance; `more` are settings of its own."""
    env = settings_environ({**deployment.connector, **more})
    if instances.devices:
        mine = instances.devices[number * instances.num_ranks : (number + 1) * instances.num_ranks]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
    return {**env, **deployment.env, **instances.env}


def _vllm(role: str, config: Config) -> tuple[str, ...]:
    transfer = {
        "kv_connector": "MooncakeKVConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[role],
        "kv_load_failure_policy": config.transfer_failure,
    }
    return "--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))


def _sglang(role: str, config: Config, bootstrap_port: int) -> tuple[str, ...]:
    served = ("--page-size", str(config.page_tokens), "--enable-metrics")
    if role == "both":
        return served
    return (
        *served,
        *("--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake_connector"),
        *(("--disaggregation-bootstrap-port", str(bootstrap_port)) if bootstrap_port else ()),
    )


def _router(
    deployment: Deployment, file: Path, prefills: list[Command], decodes: list[Command]
) -> Iterator[Command]:
    router = deployment.router
    if router.kind == "none":
        return
    listens, ports = ("--host", router.host, "--port", str(router.port)), [router.port]
    targets = [argument for one in decodes for argument in ("--decode", one.url)]
    if router.kind == "builtin":
        before = (sys.executable, "-m", "mooncake_connector.deploy.proxy", "--engine", deployment.engine)
        order = ("--order", router.order) if deployment.engine == "vllm" else ()
        arguments = [*before, *listens, *order, "--policy", router.policy.replace("_", "-")]
        arguments += _conductor(router, file) if router.policy == "conductor" else []
        if router.conductor.index is not None:
            for one in (*prefills, *decodes):
                for rank, endpoints in enumerate(one.events):
                    arguments += ["--events", ",".join((one.url, str(rank), *endpoints))]
        arguments += ["--silence-deadline-s", f"{deployment.silence_deadline_s:g}"]
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
        arguments += ["--prometheus-host", router.host]  # theirs is 0.0.0.0
        ports.append(_prometheus_port(router.flags))
        for one in prefills:
            arguments += ["--prefill", one.url, str(one.peer_port) if deployment.engine == "sglang" else "none"]
    yield Command(
        "router",
        "router",
        (*arguments, *targets, *router.flags),
        {},
        url_of(router.host, router.port),
        tuple((router.host, port) for port in ports),
        # sglang-router answers /health before it has taken its instances in.
        ready_path="/readiness" if router.kind == "sglang-router" else "/health",
    )


def _conductor(router: Router, file: Path) -> list[str]:
    """What differs from the defaults, which are those of the proxy."""
    given = router.conductor
    changed = {
        field.name: getattr(given, field.name)
        for field in msgspec.structs.fields(type(given))
        if getattr(given, field.name) != field.default
    }
    if given.index_token_file is not None:
        changed["index_token_file"] = folder_of(given.index_token_file, file)
    return [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _prometheus_port(flags: tuple[str, ...]) -> int:
    """Where a router of others has its metrics; without that port it does not start."""
    given = re.findall(r"--prometheus-port[= ](\d{1,5})\b", " ".join(flags))
    return int(given[-1]) if given else PROMETHEUS_PORT


def installed(program: str) -> str | None:
    """Where a program is: beside this Python, or on the PATH."""
    return shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)


def url_of(host: str, port: int) -> str:
    reached = ANY.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_name_on_the_hub(model: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) is not None
