"""Reads a configuration file, TOML or YAML by its suffix, into a plain dict; what the keys mean is `config`'s work."""

import sys
from pathlib import Path
from typing import Any

import yaml

from mooncake_connector.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOML = {".toml"}
_YAML = {".yaml", ".yml"}


def read_config_file(path: Path) -> dict[str, Any]:
    """The top-level mapping of the file; an empty file is an empty mapping.

    Raises ConfigError for a file that cannot be read or parsed, or that holds something else than a mapping.
    """
    suffix = path.suffix.lower()
    if suffix not in _TOML | _YAML:
        raise ConfigError(f"configuration file {path} has suffix {suffix!r}: expected .toml, .yaml or .yml")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} (from MOONCAKE_CONNECTOR_CONFIG) cannot be read: {error}"
        ) from None
    try:
        content = tomllib.loads(text) if suffix in _TOML else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if suffix in _TOML else "YAML"
        raise ConfigError(f"configuration file {path} is not valid {kind}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} holds a {type(content).__name__}: expected keys with values")
    return content
