"""A deployment as one compose.yaml: the processes of `up`, each in a container, all of them in what a pod would be.

They share network, /dev/shm and processes, so they find each other, and hand KV over, as on a host without containers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_connector.deploy.commands import Command, commands
from mooncake_connector.deploy.render.containers import (
    HUB,
    Contained,
    Secrets,
    comment,
    contained,
    dumped,
    escaped,
    how_to_build,
    image_of,
    inside,
    model_folder,
    shared_memory_mib,
)
from mooncake_connector.deploy.schema import Deployment
from mooncake_connector.deploy.supervisor import STOP_S
from mooncake_connector.errors import ConfigError

_SHARED = "service:pod"
_REFERENCE = "${{{}:?}}"
"""A variable of whoever runs it; without it nothing starts."""


def render(deployment: Deployment, file: Path, known: str) -> str:
    run = commands(inside(deployment), file, environ={})
    _check_ports(run)
    folder = model_folder(deployment, file)
    more = {} if folder else {"HF_HOME": HUB}
    secrets = Secrets()
    processes = [contained(one, _REFERENCE.format, more if one.role != "router" else {}, secrets) for one in run]
    services = {"pod": _pod(deployment, run, commands(deployment, file, environ={}))}
    for process in processes:
        services[process.command.name] = _service(deployment, process, processes, folder)
    whole: dict[str, Any] = {"name": deployment.render.name, "services": services}
    if not folder:
        whole["volumes"] = {"hub": {}}
    return comment(_head(deployment, file, known, sorted(secrets.values))) + dumped(whole)


def _check_ports(run: list[Command]) -> None:
    owners: dict[int, str] = {}
    for command in run:
        for _, port in command.listens:
            if (other := owners.setdefault(port, command.name)) != command.name:
                raise ConfigError(f"port {port} is for {other} and for {command.name}: set other ports in the file")


def _head(deployment: Deployment, file: Path, known: str, secrets: list[str]) -> list[str]:
    lines = [
        f"Made by `mooncake-connector up {file.name} --render compose`, checked by a schema, run on no Docker yet.",
        "Start it with `docker compose up -d`, and again after a reboot: what shares things with `pod` comes after it.",
        "Compose restarts what ends, and nothing for being unhealthy.",
        *how_to_build(deployment, known),
    ]
    if secrets:
        lines += [f"Set {', '.join(secrets)} in the environment, or in a file .env beside this one."]
    return [*lines, "All containers share what `pod` has: its network, its /dev/shm and its processes."]


def _pod(deployment: Deployment, run: list[Command], outside: list[Command]) -> dict[str, Any]:
    """Ports are open at the addresses of the file, to which `outside` listens without containers."""
    instances = [one for one in run if one.role != "router"]
    published = [found for one in outside for found in one.listens[: 2 if one.role == "router" else 1]]
    return {
        "image": image_of(deployment),
        "entrypoint": ["sleep", "infinity"],
        "init": True,
        "ipc": "shareable",
        "shm_size": f"{shared_memory_mib(instances[0].env, len(instances))}m",
        "ports": [f"[{host}]:{port}:{port}" if ":" in host else f"{host}:{port}:{port}" for host, port in published],
        "restart": "unless-stopped",
    }


def _service(
    deployment: Deployment, process: Contained, processes: list[Contained], folder: str | None
) -> dict[str, Any]:
    command = process.command
    is_router = command.role == "router"
    after: dict[str, Any] = {"pod": {"condition": "service_started", "restart": True}}
    if is_router:
        after |= {one.command.name: {"condition": "service_healthy"} for one in processes if one is not process}
    asked = ["CMD", "python3", "-m", "mooncake_connector.deploy.watch", "0", command.url]
    service: dict[str, Any] = {
        "image": image_of(deployment),
        "entrypoint": process.arguments,
        "network_mode": _SHARED,
        "ipc": _SHARED,
        "pid": _SHARED,
        "depends_on": after,
        "healthcheck": {
            "test": asked,
            "interval": "10s",
            "timeout": "30s",
            "retries": 3,
            "start_period": f"{deployment.start_deadline_s:.0f}s",
        },
        "stop_grace_period": f"{STOP_S:.0f}s",
        "restart": "unless-stopped",
    }
    if env := process.env | {name: _REFERENCE.format(given) for name, given in process.secrets.items()}:
        service["environment"] = env
    if not is_router:
        hub = {"type": "volume", "source": "hub", "target": HUB}
        at = escaped(folder or "")
        bound = {"type": "bind", "source": at, "target": at, "read_only": True}
        service["volumes"] = [bound if folder else hub]
    if deployment.render.gpus and not is_router:
        gpus = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
    return service
