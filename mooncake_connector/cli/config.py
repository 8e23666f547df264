"""`mooncake-connector config`: the configuration in force, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_connector.cli.columns import sheet
from mooncake_connector.cli.output import Json, command_group, print_json, print_table, typed_path, width
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_settings
from mooncake_connector.config.tiers import TierSettings
from mooncake_connector.config.together import Setting
from mooncake_connector.config.values import shown
from mooncake_connector.errors import ConfigError, PoolError
from mooncake_connector.sizes import human_nbytes
from sglang_backend import own_settings as of_sglang
from store_client.embedded.folder import choose_default
from transfer.transports.registry import check_configured
from vllm_plugin import CONNECTOR
from vllm_plugin.doctor import own_settings as of_vllm

_VLLM = "--kv-transfer-config"
_EXTRA = "kv_connector_extra_config"
_MULTI = "MultiConnector"
_SGLANG = "--hicache-storage-backend-extra-config"

app = command_group("See the configuration in force.")


@app.callback()
def config() -> None:
    """See the configuration in force."""


@app.command()
def show(
    kv_transfer_config: Annotated[
        str | None, typer.Option(_VLLM, metavar="JSON", help="As vLLM would see it that is started with this.")
    ] = None,
    hicache_extra: Annotated[
        str | None, typer.Option(_SGLANG, metavar="JSON", help="As SGLang would see it that is started with this.")
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option("--pool", "-p", metavar="DIR", parser=typed_path, help="As a `store` command with this sees it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Every setting, its value, and where that comes from. A secret is never read or printed, only the file's name.

    \b
    Examples:
      mooncake-connector config show
      mooncake-connector config show --kv-transfer-config "$THE_JSON_OF_MY_VLLM"
      mooncake-connector config show --json | jq .capacity
    """
    if kv_transfer_config is not None and hicache_extra is not None:
        raise typer.BadParameter(f"it is vLLM's, and {_SGLANG} is SGLang's: give one", param_hint=_VLLM)
    found = load_settings(_engine_json(kv_transfer_config, hicache_extra))
    given = {setting.name: setting.value for setting in found}
    check_configured(given["transports"], given["transfer_hosts"])
    if pool is not None:
        typed = Setting("pool", pool.absolute(), "command line, --pool")
        found = [typed if setting.name == "pool" else setting for setting in found]
    if as_json:
        print_json({setting.name: {"value": _plain(setting.value), "source": setting.source} for setting in found})
        return
    values = {setting.name: setting.value for setting in found}
    rows = [(one.name, _text(one, values), one.source.removeprefix("environment variable ")) for one in found]
    print_table(sheet("", ("setting", "value~", "from"), rows, width()))


def _engine_json(vllm: str | None, sglang: str | None) -> Mapping[str, Any] | None:
    """Our settings in what an engine is to get; None where no engine is asked about. Raises ConfigError."""
    if vllm is not None:
        _check_places(_parsed(vllm, _VLLM), "")
        settings = of_vllm(vllm)
        if settings is None and CONNECTOR not in vllm:
            raise ConfigError(f"{_VLLM} does not name {CONNECTOR}: vLLM would not use mooncake-connector")
        return settings or {}
    return None if sglang is None else of_sglang(_parsed(sglang, _SGLANG))


def _check_places(given: Mapping[str, Any], place: str) -> None:
    """Raise ConfigError where settings stand at a place that vLLM does not hand to the connector."""
    name, extra = given.get("kv_connector"), given.get(_EXTRA, {})
    if name not in (CONNECTOR, _MULTI):
        return
    if misplaced := [key for key in given if key in Config.__struct_fields__]:
        raise ConfigError(
            f"{_VLLM}: {place}{misplaced[0]} is a setting of mooncake-connector: put it into "
            f"{'the ' + _EXTRA + ' of ' + CONNECTOR if name == _MULTI else place + _EXTRA}"
        )
    if not isinstance(extra, dict):
        raise ConfigError(f'{_VLLM}: {place}{_EXTRA} is {shown(extra)}: expected an object, {{"key": value, ...}}')
    children = extra.get("connectors") if name == _MULTI else None
    for number, child in enumerate(children if isinstance(children, list) else ()):
        if isinstance(child, dict):
            _check_places(child, f"{place}{_EXTRA}.connectors[{number}].")


def _parsed(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{option} is no JSON: {reason}; put it in single quotes for a shell") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option} holds no object: expected {{"key": value, ...}}')
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, TierSettings):
        return {"kind": value.kind} | {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    return str(value) if isinstance(value, Path) else [*map(_plain, value)] if isinstance(value, tuple) else value


def _text(setting: Setting, values: Mapping[str, Any]) -> str:
    return _unset(setting.name, values) if setting.value is None else text_of(setting.name, setting.value)


def text_of(name: str, value: Any) -> str:
    """A value that is set, for people; of a tier its name."""
    if name == "capacity":
        return human_nbytes(value)
    if isinstance(value, tuple):
        return ", ".join(each.title if isinstance(each, TierSettings) else each for each in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unset(name: str, values: Mapping[str, Any]) -> str:
    """What stands in for a value that was not set, where that can be said."""
    if name == "min_hit_tokens":
        return f"null: one page, {values['page_tokens']}"
    if name == "pool":
        try:
            return f"null: {choose_default(values['capacity'])[0]}"
        except PoolError:
            return "null: no folder has room"
    return "null"
