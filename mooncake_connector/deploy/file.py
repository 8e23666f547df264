"""Reads a deployment file; what is wrong in it is named with its line, its key, the value and what is allowed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from mooncake_connector.config.file import entries, parse_yaml, read_text, value_of
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import checked, suggestion
from mooncake_connector.config.tiers import Tiers, place_of
from mooncake_connector.config.together import Setting, check_together
from mooncake_connector.config.values import shown
from mooncake_connector.deploy.flags import problem_with
from mooncake_connector.deploy.schema import (
    MAX_INSTANCES,
    MAX_PORT,
    Deployment,
    Environment,
    decode,
    is_variable,
    meta_of,
)
from mooncake_connector.errors import ConfigError
from mooncake_connector.log import printable

_ROUTER_OF = {"vllm-router": "vllm", "sglang-router": "sglang"}


def read_deployment(path: Path, *, for_containers: bool = False) -> Deployment:
    """Raises ConfigError, whose message begins with the file and, where there is one, the line."""
    name = printable(str(path))
    try:
        return _Reader(name, for_containers).read(read_text(path))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{name} is no deployment file: {error}") from None


class _Reader:
    """One file on its way from YAML nodes to values."""

    def __init__(self, name: str, for_containers: bool) -> None:
        self._name, self._for_containers = name, for_containers
        self._lines: dict[str, int] = {}
        """Of each key by its full name, such as "prefill.count"."""

    def read(self, text: str) -> Deployment:
        self._loader, root = parse_yaml(text)
        if root is None:
            raise ValueError("it is empty: expected engine and model at least")
        found: Deployment = self._struct(root, Deployment, "", 1)
        self._check_together(found)
        return found

    def _struct(self, node: yaml.Node, kind: type[msgspec.Struct], place: str, line: int) -> Any:
        """`place` is what the names of its keys begin with, "" or "prefill."."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(line, f"{place.rstrip('.') or 'the file'} holds no keys with values")
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        values: dict[str, Any] = {}
        for key, (value_node, at) in entries(self._loader, node).items():
            if key not in fields:
                raise self._error(at, f"unknown key {shown(f'{place}{key}')}{suggestion(str(key), list(fields))}")
            self._lines[f"{place}{key}"] = at
            values[key] = self._value(value_node, fields[key], f"{place}{key}", at)
        for name, field in fields.items():
            if field.required and name not in values:
                raise self._error(line, f"{place}{name} is missing: expected {_allowed(field)}")
        return kind(**values)

    def _value(self, node: yaml.Node, field: msgspec.structs.FieldInfo, name: str, line: int) -> Any:
        kind = get_args(field.type)[0]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(node, kind, f"{name}.", line)
        value = value_of(self._loader, node, name)
        if name == "connector":
            return self._settings(node, value, line)
        if kind is Environment and isinstance(node, yaml.MappingNode):
            self._check_variables(node, value, name, field)
        try:
            return msgspec.convert(value, field.type, dec_hook=decode)
        except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
            given = "not shown here" if kind is Environment else shown(value)  # tokens and passwords are in it
            raise self._error(line, f"{name} is {given}: expected {_allowed(field)}") from None

    def _check_variables(
        self, node: yaml.MappingNode, values: Mapping[Any, Any], name: str, field: msgspec.structs.FieldInfo
    ) -> None:
        """Of each by itself, so that the one that is wrong is named."""
        for key, (_, line) in entries(self._loader, node).items():
            value = values[key]
            if not is_variable(key):
                raise self._error(line, f"{name} has {shown(key)}: expected {_allowed(field)}")
            if type(value) not in (str, int, float):
                given = shown(value) if value is None or isinstance(value, bool) else "not shown here"
                raise self._error(line, f"{name}.{key} is {given}: expected text or a number; put others in quotes")

    def _settings(self, node: yaml.Node, values: Any, line: int) -> Mapping[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(line, f"connector is {shown(values)}: expected settings of mooncake-connector")
        given: dict[str, Setting] = {}
        for key, (_, at) in entries(self._loader, node).items():
            if key == "transfer_port":
                raise self._error(at, "connector.transfer_port is set by `up` for each instance: leave it out")
            given[key] = checked(key, values[key], f"{self._name}, line {at}")
            if self._for_containers:
                self._check_rendered(key, values[key], at)
                if key == "tiers" and values.get("agent") != "external":
                    self._check_folders(given[key].value, at)
        defaults = msgspec.structs.fields(Config)
        check_together([given.get(one.name) or Setting(one.name, one.default, "default") for one in defaults])
        return {**values}

    def _check_rendered(self, key: str, value: Any, line: int) -> None:
        """What a container would not find where this machine has it."""
        if key == "pool" and value is not None and not os.path.normpath(value).startswith("/dev/shm/"):
            problem = f"connector.pool is {shown(value)}: expected a folder below /dev/shm, which containers share"
            raise self._error(line, problem)
        if key.startswith("tls_") and value is not None:
            raise self._error(line, f"connector.{key} is not rendered: leave it out, and add certificates afterwards")

    def _check_folders(self, tiers: Tiers, line: int) -> None:
        """An agent that an engine starts runs in that engine's container."""
        for tier in tiers:
            if place_of(tier) is not None:
                problem = f"connector.tiers has {tier.title!r}, whose folder no container of an engine has: set "
                raise self._error(line, f"{problem}connector.agent to external, and add the agent (docs/fleet.md)")

    def _check_together(self, found: Deployment) -> None:
        if not found.decode.count:
            at = self._lines["decode.count"]
            raise self._error(at, f"decode.count is 0: expected an integer from 1 to {MAX_INSTANCES}")
        for role in ("prefill", "decode"):
            instances = getattr(found, role)
            needed = instances.count * instances.num_ranks
            if instances.devices and len(instances.devices) != needed:
                line = self._lines[f"{role}.devices"]
                raise self._error(
                    line,
                    f"{role}.devices has {len(instances.devices)} GPUs: expected {needed}, which is count "
                    f"({instances.count}) times tp ({instances.tp}) times pp ({instances.pp})",
                )
            last = (instances.port or 0) + instances.count - 1
            if instances.port and last > MAX_PORT:
                raise self._error(
                    self._lines[f"{role}.port"],
                    f"{role}.port is {instances.port} and {role}.count is {instances.count}, which makes {last} the "
                    f"last port: expected at most {MAX_PORT}",
                )
        if found.engine == "sglang" and found.decode.pp > 1:
            raise self._error(
                self._lines["decode.pp"],
                f"decode.pp is {found.decode.pp}, and engine is 'sglang', whose decode instances are no pipelines: "
                "expected 1",
            )
        places = {"flags": found.flags, "prefill.flags": found.prefill.flags, "decode.flags": found.decode.flags}
        for name, flags in {**places, "router.flags": found.router.flags}.items():
            if problem := problem_with(flags, "router" if name == "router.flags" else found.engine):
                raise self._error(self._lines[name], f"{name} {problem}")
        router = found.router
        engine = _ROUTER_OF.get(router.kind, found.engine)
        if engine != found.engine:
            raise self._error(
                self._lines["router.kind"],
                f"router.kind is '{router.kind}', which serves {engine} alone, and engine is '{found.engine}': "
                f"expected {found.engine}-router, builtin or none",
            )
        if not found.prefill.count and router.kind in _ROUTER_OF:
            raise self._error(
                self._lines["prefill.count"],
                f"prefill.count is 0, and router.kind is '{router.kind}', which `up` starts for prefill and decode: "
                "expected an integer from 1, or a router.kind of builtin or none",
            )
        for name, ours in (("order", True), ("policy", True), ("conductor", True), ("flags", False)):
            if f"router.{name}" in self._lines and ours is not (router.kind == "builtin"):
                kinds = "builtin" if ours else "vllm-router or sglang-router"
                raise self._error(
                    self._lines[f"router.{name}"],
                    f"router.{name} is for a router.kind of {kinds}, and that is '{router.kind}': leave it out",
                )
        if "router.conductor" in self._lines and router.policy != "conductor":
            raise self._error(
                self._lines["router.conductor"],
                f"router.conductor is for a router.policy of conductor, and that is '{router.policy}': leave it out, "
                "or set router.policy",
            )
        if self._for_containers and router.conductor.index_token_file is not None:
            problem = "router.conductor.index_token_file is not rendered: leave it out, and mount it afterwards"
            raise self._error(self._lines["router.conductor.index_token_file"], problem)

    def _error(self, line: int, problem: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {line}: {printable(problem)}")


def _allowed(field: msgspec.structs.FieldInfo) -> str:
    return str((meta_of(field).extra or {})["allowed"])
