"""What tests of rendered deployments share: the forms, how one is rendered, read, and held against its schema."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import referencing
import yaml

from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.deploy.render import compose, kubernetes

FORMS = {"compose": compose.render, "k8s": kubernetes.render, "rbg": kubernetes.render_group}
KUBERNETES = "v1.37.0-local-strict"
COMPOSE = jsonschema.Draft202012Validator(
    json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
)
HIDDEN = "hunter2"

GROUP_ROLE = {
    "type": "object",
    "required": ["name", "replicas", "standalonePattern"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "replicas": {"type": "integer", "minimum": 0},
        "annotations": {
            "additionalProperties": False,
            "properties": {
                "rbg.workloads.x-k8s.io/role-workload-type": {"enum": ["apps/v1/StatefulSet", "apps/v1/Deployment"]}
            },
        },
        "dependencies": {"type": "array", "items": {"type": "string"}},
        "standalonePattern": {"required": ["template"], "additionalProperties": False, "properties": {"template": {}}},
    },
}
"""Of RoleBasedGroup's CRD, workloads.x-k8s.io/v1alpha2 as of v0.8.0-alpha.5, the fields that are used here."""


def rendered(tmp: Path, content: dict[str, Any] | str, form: str) -> str:
    file = tmp / "d.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True))
    return FORMS[form](read_deployment(file, for_containers=True), file, "1.2.3")


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def pods(text: str) -> dict[str, dict[str, Any]]:
    """By role: {"replicas", "metadata", "spec"}, of plain objects or of a group."""
    found = {}
    for one in documents(text):
        if one["kind"] == "RoleBasedGroup":
            for role in one["spec"]["roles"]:
                found[role["name"]] = {"replicas": role["replicas"], **role["standalonePattern"]["template"]}
        elif one["kind"] in ("StatefulSet", "Deployment"):
            role = one["metadata"]["labels"]["app.kubernetes.io/component"]
            found[role] = {"replicas": one["spec"]["replicas"], **one["spec"]["template"]}
    return found


def expanded(word: str) -> str:
    """As Kubernetes and Compose read it, references left as they are."""
    return word.replace("$$", "$")


def validator(one: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Of Kubernetes' own schema for such an object, where fields that it does not know are errors."""
    return validator_of(one["kind"].lower(), one["apiVersion"].replace("/", "-"))


@functools.cache
def validator_of(kind: str, version: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(f"{kind}-{version}"), registry=definitions())


@functools.cache
def definitions() -> referencing.Registry:
    return referencing.Resource.from_contents(schema("_definitions")) @ referencing.Registry()


def schema(name: str) -> dict[str, Any]:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    return json.loads((folder / f"{name}.json").read_text())


def check_valid(text: str, form: str) -> None:
    if form == "compose":
        assert [error.message for error in COMPOSE.iter_errors(yaml.safe_load(text))] == []
        return
    for one in documents(text):
        if one["kind"] != "RoleBasedGroup":
            validator(one).validate(one)
            continue
        assert one["apiVersion"] == "workloads.x-k8s.io/v1alpha2" and set(one["spec"]) == {"roles"}
        for role in one["spec"]["roles"]:
            jsonschema.validate(role, GROUP_ROLE)
            assert set(role["standalonePattern"]["template"]) <= {"metadata", "spec"}
            template = {**role["standalonePattern"], "apiVersion": "v1", "kind": "PodTemplate"}
            validator(template).validate(template)


def env_of(pod: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][0]["env"]}
