"""The four places that values of the configuration come from.

Precedence, field by field: the engine's JSON, then environment variables, then the file named by
`MOONCAKE_CONNECTOR_CONFIG`, then the default. Every source is checked in full, also where another one wins.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Meta

from mooncake_connector.config.environ import is_service_variable
from mooncake_connector.config.file import read_config_file
from mooncake_connector.config.schema import Config
from mooncake_connector.config.tiers import decode_tiers
from mooncake_connector.config.together import Setting, check_together
from mooncake_connector.config.values import decode, shown
from mooncake_connector.errors import ConfigError

ENV_PREFIX = "MOONCAKE_CONNECTOR_"
ENV_FILE = ENV_PREFIX + "CONFIG"

_FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}
_LONGEST_NAME = 80
_PRIVATE = {"secret_file", "agent_http_token_file", "tls_key"}
"""Fields in which a person may put the secret itself by mistake: a message does not repeat what was refused."""


def load_config(
    engine_json: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration in force. `environ` defaults to the process's environment.

    Raises ConfigError that names the source, the key, the value seen and what is allowed.
    """
    return config_of(load_settings(engine_json, environ))


def config_of(settings: Iterable[Setting]) -> Config:
    return Config(**{setting.name: setting.value for setting in settings})


def page_tokens_set(settings: Iterable[Setting]) -> int | None:
    """`page_tokens`, where somebody has set it."""
    found = (int(one.value) for one in settings if one.name == "page_tokens" and one.source != "default")
    return next(found, None)


def load_settings(
    engine_json: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Setting]:
    """Every field of the configuration in force, with its source. Raises as `load_config`."""
    environ = os.environ if environ is None else environ
    given: dict[str, Setting] = {}
    file_name = environ.get(ENV_FILE, "")
    if file_name:
        for name, (value, line) in read_config_file(Path(file_name)).items():
            where = f"file {file_name}" + (f", line {line}" if line else "")
            given[name] = checked(name, value, where)
    given |= _from_environ(environ)
    if engine_json is not None:
        if not isinstance(engine_json, Mapping):
            raise ConfigError(f"the engine's JSON holds {shown(engine_json)}: expected keys with values")
        given |= {name: checked(name, value, "the engine's JSON") for name, value in engine_json.items()}
    settings = [given.get(name) or Setting(name, field.default, "default") for name, field in _FIELDS.items()]
    check_together(settings)
    return settings


def environ_name(field: str) -> str:
    """The environment variable that sets one field."""
    return ENV_PREFIX + field.upper()


def field_metadata(name: str) -> Meta:
    """Description, bounds and `extra` ("allowed") of one field of `Config`."""
    meta = _FIELDS[name].type.__metadata__[0]
    assert isinstance(meta, Meta)
    return meta


def _from_environ(environ: Mapping[str, str]) -> dict[str, Setting]:
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable == ENV_FILE or environ[variable] == "":
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        ours = name in _FIELDS and variable == environ_name(name)
        if is_service_variable(variable, environ, ours):
            continue
        if not ours:
            known = [field.upper() for field in _FIELDS]
            raise ConfigError(
                f"environment variable {variable[:_LONGEST_NAME]} is unknown{suggestion(variable, known, ENV_PREFIX)}"
            )
        source = f"environment variable {variable}"
        given[name] = Setting(name, _convert(name, environ[variable], source, strict=False), source)
    return given


def checked(name: Any, value: Any, where: str) -> Setting:
    """One setting, written at `where`, by its name. Raises ConfigError."""
    if name not in _FIELDS:
        raise ConfigError(f"unknown configuration key {shown(name)} in {where}{suggestion(str(name), list(_FIELDS))}")
    return Setting(name, _convert(name, value, f"{name} in {where}", strict=True), where)


def suggestion(name: str, known: list[str], prefix: str = "") -> str:
    """What a message about an unknown name ends with; the `known` ones all begin with `prefix`, left out of them."""
    close = difflib.get_close_matches(name[:_LONGEST_NAME], [prefix + one for one in known], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{hint}; known are{f', after {prefix},' if prefix else ''} {', '.join(known)}"


def _convert(name: str, value: Any, source: str, *, strict: bool) -> Any:
    """`value` as the field's type; text such as "64", "null" or "1.5" counts as a value where not `strict`."""
    if not strict and value == "null" and _FIELDS[name].default is None:
        return None
    try:
        if name == "tiers":
            return decode_tiers(value, strict=strict)
        return msgspec.convert(
            value, _FIELDS[name].type, strict=strict, dec_hook=lambda wanted, seen: decode(wanted, seen, strict)
        )
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        extra = field_metadata(name).extra or {}
        if name == "tiers" and isinstance(error, ValueError) and not isinstance(error, msgspec.ValidationError):
            raise ConfigError(f"{source}: {error}") from None
        is_private = name == "tiers" or (name in _PRIVATE and value and isinstance(value, str))
        seen = "not shown here" if is_private else shown(value)
        raise ConfigError(f"{source} is {seen}: expected {extra['allowed']}") from None
