"""What `mooncake-connector doctor vllm` looks at: vLLM as it would start in this environment, but not started.

With `--kv-transfer-config JSON` also what is wrong with that. What the connector's own settings come to, environment
and file included, is the doctor's check of the configuration.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mooncake_connector import checks, quick_start
from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.errors import ConfigError
from vllm_plugin import CONNECTOR, MODULE
from vllm_plugin.device.checks import check_allocator, check_page_locks
from vllm_plugin.early import parts

KNOWN_VERSION = "0.32.0"
PARTLY_KNOWN = {"0.33.0": "of 0.33.0 its interface and its scheduler alone, no running engine"}
START = quick_start.VLLM

_LATER = ("unregister_kv_caches", "restore_kv_caches")
"""What vLLM has from 0.33 on."""
_GROUP = "vllm.general_plugins"
_WHITELIST = "VLLM_PLUGINS"
_NAME = "engine JSON"
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_MULTI = "MultiConnector"


def run(transfer_config: str | None = None) -> Iterator[Check]:
    """The checks, in the order in which one follows from the other; importing vLLM takes some seconds.

    Args:
        transfer_config: what follows `--kv-transfer-config`.
    """
    try:
        import vllm
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.plugins import load_general_plugins
    except Exception as error:
        yield checks.not_imported("vLLM", "vllm", error)
        return
    yield checks.version("vLLM", vllm.__version__, KNOWN_VERSION, PARTLY_KNOWN)
    whitelist = os.environ.get(_WHITELIST)
    chosen = None if whitelist is None else whitelist.split(",")
    entry = checks.entry_point(_GROUP, "mooncake_connector", "vllm_plugin:register", chosen, _WHITELIST)
    yield entry
    if entry.status is checks.Verdict.FAILED:
        return
    try:
        load_general_plugins()
        connector = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except Exception as error:
        yield failed("connector", f"vLLM's factory cannot load it: {type(error).__name__}: {error}")
        return
    yield checks.interface("connector", connector, beside=_LATER)
    yield from check_allocator()
    yield from check_page_locks()
    if transfer_config is not None:
        yield from check_config(transfer_config)


def own_settings(text: str) -> Mapping[str, Any] | None:
    """`kv_connector_extra_config` of our connector, wherever it stands; None where the JSON does not say so much."""
    try:
        found = [part for part in parts(json.loads(text)) if part.get("kv_connector") == CONNECTOR]
    except (ValueError, RecursionError):
        return None
    extra = found[0].get("kv_connector_extra_config") if found else None
    return extra if isinstance(extra, Mapping) else None


def check_config(text: str) -> Iterator[Check]:
    """All that is wrong with what follows `--kv-transfer-config`; vLLM and its plugins are loaded already."""
    try:
        given = json.loads(text)
    except RecursionError:
        yield failed(_NAME, "is nested too deeply")
        return
    except ValueError as error:
        at = getattr(error, "pos", 0)
        yield failed(
            _NAME,
            f"is no JSON: {error}, at {text[at : at + 20]!r}; write names and texts in double quotes, and all of it in "
            "single quotes for a shell",
        )
        return
    if not isinstance(given, dict):
        yield failed(_NAME, f'is {given!r:.40}: expected an object, as in {{"kv_connector": "{CONNECTOR}", ...}}')
        return
    wrong = [*_wrong(given, ""), *_wrong_together(given)] or list(_wrong_for_vllm(given))
    if wrong:
        yield failed(_NAME, "; ".join(wrong))
        return
    yield ok(_NAME, f"kv_connector = {given['kv_connector']}, kv_role = {given['kv_role']}")
    extra = own_settings(text) or {}
    try:
        config, others = load_config(extra), load_config()
    except ConfigError:
        return
    for odd in (*_odd_policy(given, config), *_odd_order(given), *_overridden(extra, config, others)):
        yield warning(_NAME, odd)


def _wrong(given: Mapping[str, Any], where: str) -> Iterator[str]:
    """What is wrong with the configuration of one connector, and of those within it."""
    from vllm.config import KVTransferConfig

    known = [field.name for field in dataclasses.fields(KVTransferConfig)]
    for key in given:
        if key in Config.__struct_fields__:
            yield f"{where}{key} is a setting of the connector: put it into {where}kv_connector_extra_config"
        elif key not in known:
            yield f"{where}{key} is unknown{_meant(key, known)}; vLLM knows {', '.join(known)}"
    role = given.get("kv_role")
    if role not in _ROLES:
        seen = "missing" if role is None else repr(role)
        yield f"{where}kv_role is {seen}{_meant(role, _ROLES)}: expected {', '.join(_ROLES)}"
    yield from _wrong_class(given, where)
    extra = given.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        yield f"{where}kv_connector_extra_config is {extra!r:.40}: expected an object"
    elif given.get("kv_connector") == _MULTI:
        yield from _wrong_children(extra.get("connectors"), f"{where}kv_connector_extra_config.connectors")


def _wrong_class(given: Mapping[str, Any], where: str) -> Iterator[str]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    known = list(KVConnectorFactory._registry)
    if not isinstance(name, str) or not name:
        yield f'{where}kv_connector is {"missing" if name is None else repr(name)}: expected "{CONNECTOR}"'
    elif module is None:
        if name not in known:
            yield f"{where}kv_connector is {name!r}, which vLLM does not know{_meant(name, known)}"
    else:
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:
            yield (
                f"{where}kv_connector_module_path is {module!r}, where vLLM finds no {name} "
                f"({type(error).__name__}: {error}): leave it out, or write {MODULE!r}"
            )


def _wrong_children(children: Any, where: str) -> Iterator[str]:
    if not isinstance(children, list) or not children:
        yield f"{where} is {'missing' if children is None else repr(children)[:40]}: expected a list of connectors"
        return
    for number, child in enumerate(children):
        place = f"{where}[{number}]"
        if not isinstance(child, dict):
            yield f"{place} is {child!r:.40}: expected an object"
            continue
        if "engine_id" in child:
            yield f"{place}.engine_id must be left out: vLLM sets it to {_MULTI}'s, and fails on any other"
        yield from _wrong(child, f"{place}.")


def _wrong_together(given: Mapping[str, Any]) -> Iterator[str]:
    names = [part.get("kv_connector") for part in parts(given)]
    times = names.count(CONNECTOR)
    if times > 1:
        yield f"{CONNECTOR} is listed {times} times: list it once; it serves both the pool and transfers"
    elif CONNECTOR not in names and isinstance(names[0], str):
        yield f"{', '.join(map(str, names))} is not of mooncake-connector, which would not be used: write {CONNECTOR}"


def _wrong_for_vllm(given: Mapping[str, Any]) -> Iterator[str]:
    """What only vLLM's own class finds."""
    from pydantic import ValidationError
    from vllm.config import KVTransferConfig

    try:
        KVTransferConfig(**given)
    except ValidationError as error:
        for one in error.errors():
            yield f"{'.'.join(map(str, one['loc']))} is {one['input']!r:.40}: {one['msg']}"
    except ConfigError:
        pass  # the check of the configuration says it


def _odd_policy(given: Mapping[str, Any], config: Config) -> Iterator[str]:
    policy, ours = given.get("kv_load_failure_policy", "fail"), config.transfer_failure
    if given["kv_connector"] == _MULTI:
        if policy != ours:
            yield (
                f"kv_load_failure_policy of the {_MULTI} is {policy!r}, and vLLM reads no other: a request whose page "
                f"is lost {'fails' if policy == 'fail' else 'is computed'}, whatever transfer_failure ({ours!r}) says"
            )
    elif policy != ours and "kv_load_failure_policy" in given:
        yield f"kv_load_failure_policy is {policy!r}, but transfer_failure ({ours!r}) takes its place"


def _odd_order(given: Mapping[str, Any]) -> Iterator[str]:
    names = [part.get("kv_connector") for part in parts(given)]
    if given["kv_connector"] == _MULTI and names.index(CONNECTOR) > 1:
        yield f"{names[1]} comes before {CONNECTOR}: the first that has some of a prompt loads it; put ours first"


def _overridden(extra: Mapping[str, Any], config: Config, others: Config) -> Iterator[str]:
    for name in extra:
        variable = environ_name(name)
        if os.environ.get(variable) and getattr(others, name) != getattr(config, name):
            yield f"{name} is {extra[name]!r} here and {os.environ[variable]!r} in {variable}: the JSON wins"


def _meant(seen: Any, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(seen), known, n=1)
    return f" (did you mean {close[0]}?)" if close and seen is not None else ""
