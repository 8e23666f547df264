"""A deployment for Kubernetes: a set of pods for each role, with names that the router can be told.

Pods have networks of their own, so KV travels over TCP between their addresses, with a secret that all of them share.
"""

from __future__ import annotations

import math
import os.path
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake_connector.deploy.commands import Command, commands
from mooncake_connector.deploy.render.containers import (
    HUB,
    Contained,
    Secrets,
    comment,
    contained,
    dumped,
    how_to_build,
    image_of,
    inside,
    model_folder,
    shared_memory_mib,
)
from mooncake_connector.deploy.schema import Deployment, folder_of

_SECRET_FOLDER = "/run/mooncake-connector"
_HOSTS = "MOONCAKE_CONNECTOR_TRANSFER_HOSTS"
_TRANSFERS = {
    "MOONCAKE_CONNECTOR_TRANSPORTS": "tcp",
    _HOSTS: "",  # the pod's own, which Kubernetes fills in
    "MOONCAKE_CONNECTOR_SECRET_FILE": f"{_SECRET_FOLDER}/secret",
}
_STARTUP_PERIOD_S, _LIVENESS_PERIOD_S = 5, 20
_WITHOUT_KV = {"vllm": "decode pods compute every prompt themselves", "sglang": "every request fails"}


@dataclass(frozen=True, slots=True)
class _Role:
    name: str
    count: int
    process: Contained
    waits_for: tuple[str, ...] = ()
    """URLs that must answer before it starts."""

    @property
    def is_router(self) -> bool:
        return self.name == "router"

    @property
    def command(self) -> Command:
        return self.process.command

    @property
    def ports(self) -> dict[str, int]:
        """By their names. Others are chosen at the start, and told from pod to pod."""
        known = [port for _, port in self.command.listens]
        if self.is_router:
            return dict(zip(("http", "metrics"), known, strict=False))
        return {"http": known[0], **({"peer": self.command.peer_port} if self.command.peer_port else {})}


def render(deployment: Deployment, file: Path, known: str) -> str:
    """Plain objects: StatefulSets for the instances, a Deployment for the router, and their Services."""
    name = deployment.render.name
    roles = _roles(deployment, file, f"{name}-{{role}}-{{number}}.{name}-{{role}}")
    objects = [one for role in roles for one in _objects(deployment, role, _template(deployment, role, file))]
    return _written(deployment, file, known, "k8s", roles, [*objects, *_front(deployment, roles)])


def render_group(deployment: Deployment, file: Path, known: str) -> str:
    """A RoleBasedGroup, whose controller makes the same of it, and the Services of instances."""
    name = deployment.render.name
    roles = _roles(deployment, file, f"{name}-{{role}}-{{number}}.s-{name}-{{role}}")
    group = {
        "apiVersion": "workloads.x-k8s.io/v1alpha2",
        "kind": "RoleBasedGroup",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": name}},
        "spec": {"roles": [_group_role(role, roles, _template(deployment, role, file)) for role in roles]},
    }
    return _written(deployment, file, known, "rbg", roles, [group, *_front(deployment, roles)])


def _group_role(role: _Role, roles: list[_Role], template: dict[str, Any]) -> dict[str, Any]:
    kind = "Deployment" if role.is_router else "StatefulSet"
    after = {"dependencies": [one.name for one in roles if not one.is_router]} if role.is_router else {}
    return {
        "name": role.name,
        "replicas": role.count,
        "annotations": {"rbg.workloads.x-k8s.io/role-workload-type": f"apps/v1/{kind}"},
        **after,
        "standalonePattern": {"template": template},
    }


def _roles(deployment: Deployment, file: Path, hosts: str) -> list[_Role]:
    listening = inside(deployment)
    bare = {one: msgspec.structs.replace(getattr(listening, one), devices=()) for one in ("prefill", "decode")}
    run = commands(msgspec.structs.replace(listening, **bare), file, hosts=hosts, environ={})
    more = _TRANSFERS if model_folder(deployment, file) else {**_TRANSFERS, "HF_HOME": HUB}
    secrets = Secrets()
    roles = [
        _Role(one, getattr(deployment, one).count, contained(_first(run, one), "$({})".format, more, secrets))
        for one in ("prefill", "decode")
        if getattr(deployment, one).count
    ]
    if deployment.router.kind != "none":
        own = deployment.router.kind == "builtin"  # asks by itself; the others give up instances that are not there yet
        urls = () if own else tuple(one.url for one in run if one.role != "router")
        roles.append(_Role("router", 1, contained(_first(run, "router"), "$({})".format, {}, secrets), urls))
    return roles


def _first(run: list[Command], role: str) -> Command:
    """All of a role are the same but for their names."""
    return next(one for one in run if one.role == role)


def _written(
    deployment: Deployment, file: Path, known: str, form: str, roles: list[_Role], documents: list[dict[str, Any]]
) -> str:
    name, file_of_secret = deployment.render.name, deployment.connector.get("secret_file")
    keys = sorted({key for role in roles for key in role.process.secrets.values()})
    secret = shlex.quote(f"secret={folder_of(file_of_secret, file)}") if file_of_secret else ""
    words = [f"--from-file={secret}" if secret else '--from-literal=secret="$(openssl rand -hex 32)"']
    words += [f"--from-literal={one}=..." for one in keys]
    lines = [
        f"Made by `mooncake-connector up {file.name} --render {form}`; checked against schemas, run on no cluster yet.",
        *how_to_build(deployment, known),
        "The secret that all instances share is not in here. Make it once, before `kubectl apply`:",
        f"    kubectl create secret generic {name} {' '.join(words)}",
        "Processes run as the image's user, which has to be root to read it; for others see docs/operations.md.",
        "Requests and limits of memory are yours to set: /dev/shm counts towards them.",
    ]
    if folder := model_folder(deployment, file):
        where = f"the claim {deployment.render.claim}" if deployment.render.claim else "each node (or set render.claim)"
        lines.append(f"The model has to be in {folder} of {where}.")
    if deployment.render.gpus and deployment.prefill.count:
        lines.append(f"KV on GPUs does not travel between pods yet: {_WITHOUT_KV[deployment.engine]}.")
    if deployment.router.kind != "none":
        lines.append(f"Clients ask http://{name}:{deployment.router.port}.")
    return comment(lines) + "".join(f"---\n{dumped(one)}" for one in documents)


def _labels(deployment: Deployment, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": deployment.render.name, "app.kubernetes.io/component": role}


def _objects(deployment: Deployment, role: _Role, template: dict[str, Any]) -> list[dict[str, Any]]:
    labels = _labels(deployment, role.name)
    meta = {"name": f"{deployment.render.name}-{role.name}", "labels": labels}
    spec: dict[str, Any] = {"replicas": role.count, "selector": {"matchLabels": labels}, "template": template}
    if role.is_router:
        return [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}]
    own = {"serviceName": meta["name"], "podManagementPolicy": "Parallel"}
    # Names are there before their pods are ready: nobody has to remember that one was not.
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, **_service(labels, role)}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": headless},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": {**own, **spec}},
    ]


def _front(deployment: Deployment, roles: list[_Role]) -> list[dict[str, Any]]:
    """What clients ask. A RoleBasedGroup takes over a Service that is called GROUP-ROLE, which this is not."""
    labels = _labels(deployment, "router")
    meta = {"name": deployment.render.name, "labels": labels}
    routers = [role for role in roles if role.is_router]
    return [{"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": _service(labels, one)} for one in routers]


def _service(labels: dict[str, str], role: _Role) -> dict[str, Any]:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in role.ports.items()]
    return {"selector": labels, "ports": ports}


def _template(deployment: Deployment, role: _Role, file: Path) -> dict[str, Any]:
    volumes = [] if role.is_router else _volumes(deployment, role, file)
    env = {"env": found} if (found := _env(deployment, role)) else {}
    container: dict[str, Any] = {
        "name": role.name,
        "image": image_of(deployment),
        "command": role.process.arguments,
        **env,
        "ports": [{"name": name, "containerPort": port} for name, port in role.ports.items()],
        **_probes(deployment, role),
    }
    if deployment.render.gpus and not role.is_router:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(getattr(deployment, role.name).num_ranks)}}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT
        "containers": [container],
    }
    if volumes:
        container["volumeMounts"] = [mount for mount, _ in volumes]
        spec["volumes"] = [volume for _, volume in volumes]
    if role.waits_for:
        limit = f"{deployment.start_deadline_s:.0f}"
        waiting = ["python3", "-m", "mooncake_connector.deploy.watch", limit, *role.waits_for]
        spec["initContainers"] = [{"name": "wait", "image": image_of(deployment), "command": waiting}]
    return {"metadata": {"labels": _labels(deployment, role.name)}, "spec": spec}


def _env(deployment: Deployment, role: _Role) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": deployment.render.name, "key": key}}}
        for name, key in role.process.secrets.items()
    ]
    for name, value in role.process.env.items():
        own = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} if name == _HOSTS else {"value": value}
        env.append({"name": name, **own})
    return env


def _probes(deployment: Deployment, role: _Role) -> dict[str, Any]:
    asked = {"httpGet": {"path": role.command.ready_path, "port": "http"}}
    ready = {**asked, "periodSeconds": 5, "timeoutSeconds": 20}
    if role.is_router:  # it says no as long as there are no instances, which its restart does not mend
        return {"readinessProbe": ready, "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10}}
    tries = math.ceil(deployment.start_deadline_s / _STARTUP_PERIOD_S)
    silent = math.ceil(deployment.silence_deadline_s / _LIVENESS_PERIOD_S)
    return {
        "startupProbe": {**asked, "periodSeconds": _STARTUP_PERIOD_S, "timeoutSeconds": 20, "failureThreshold": tries},
        "readinessProbe": ready,
        "livenessProbe": {
            **asked,
            "periodSeconds": _LIVENESS_PERIOD_S,
            "timeoutSeconds": 20,
            "failureThreshold": silent,
        },
    }


def _volumes(deployment: Deployment, role: _Role, file: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Where each is mounted, and what it is."""
    folder, claim = model_folder(deployment, file), deployment.render.claim
    shared = {"medium": "Memory", "sizeLimit": f"{shared_memory_mib(role.command.env, 1)}Mi"}
    # Nobody but its owner may read the file, which is root; 256 is 0400.
    secret = {"secretName": deployment.render.name, "defaultMode": 256, "items": [{"key": "secret", "path": "secret"}]}
    model: dict[str, Any] = {"name": "model", "mountPath": folder or HUB}
    if folder:
        model |= {"readOnly": True, **({"subPath": os.path.basename(folder)} if claim else {})}
    of_claim = {"persistentVolumeClaim": {"claimName": claim}}
    of_node = {"hostPath": {"path": folder, "type": "Directory"}} if folder else {"emptyDir": {}}
    return [
        ({"name": "shm", "mountPath": "/dev/shm"}, {"name": "shm", "emptyDir": shared}),
        ({"name": "secret", "mountPath": _SECRET_FOLDER, "readOnly": True}, {"name": "secret", "secret": secret}),
        (model, {"name": "model", **(of_claim if claim else of_node)}),
    ]
