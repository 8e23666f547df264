"""Configuration: one schema, and four places that values come from.

Precedence, field by field: the engine's JSON, then environment variables, then the file named by
`MOONCAKE_CONNECTOR_CONFIG`, then the default. Every source is checked in full, also where another one wins.
docs/configuration.md is generated from the schema by `mooncake_connector.config_docs`.
"""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake_connector.config_file import read_config_file
from mooncake_connector.errors import ConfigError

ENV_PREFIX = "MOONCAKE_CONNECTOR_"
ENV_FILE = ENV_PREFIX + "CONFIG"

MIN_CAPACITY_NBYTES = 1 << 20
MAX_CAPACITY_NBYTES = 1 << 50

_UNITS = {"": 0, "B": 0, "KIB": 10, "MIB": 20, "GIB": 30, "TIB": 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Nbytes(int):
    """A size in bytes; from text it takes binary units: "512MiB", "1.5GiB"."""


class PageTokens(int):
    """A page size: a power of two from 16 to 1024."""


def _field(description: str, allowed: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"allowed": allowed}, **bounds)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be configured; the defaults work on one machine with nothing set."""

    pool: Annotated[
        Path | None,
        _field(
            "Folder of the page pool. All engine processes that name the same folder share their pages. "
            "It is created with mode 0700 where it is missing. Unset: `/dev/shm/mooncake-connector-<uid>`, or a folder "
            "of that name in the temporary folder where shared memory is too small, which the log then says.",
            "an absolute path (`~` is expanded); null for the default",
        ),
    ] = None
    capacity: Annotated[
        Nbytes | None,
        _field(
            "Most bytes of pages that the pool may hold; the oldest pages are evicted beyond that. Unset: a quarter of "
            "what the folder's file system has free when the pool is created, at most 16 GiB.",
            'bytes as an integer, or text such as "8GiB", from 1MiB to 1024TiB; null for the default',
        ),
    ] = None
    page_tokens: Annotated[
        PageTokens,
        _field(
            "Tokens in a page. Only instances with the same value share pages. Smaller pages reuse more of a prefix, "
            "larger ones cost less to look up and move.",
            "a power of two from 16 to 1024",
        ),
    ] = PageTokens(64)
    model_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        _field(
            "Name to trust as the model's identity in place of the content of its files. Set it where the weights "
            "cannot be read, and change it whenever the weights change: pages of equal `model_id` are shared.",
            "text of 1 to 256 characters; null to hash the model's files",
        ),
    ] = None
    min_hit_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | None,
        _field(
            "Hits of fewer tokens are computed instead of loaded. Unset: one page (`page_tokens`).",
            "an integer from 1 to 1048576; null for one page",
        ),
    ] = None
    load_deadline_s: Annotated[
        float,
        _field(
            "Seconds after which a load that has not finished is given up and its tokens are computed.",
            "a number above 0, at most 600",
            gt=0,
            le=600,
        ),
    ] = 5.0
    save_deadline_s: Annotated[
        float,
        _field(
            "Seconds after which a save that has not finished is given up, so that the engine gets its blocks back.",
            "a number above 0, at most 600",
            gt=0,
            le=600,
        ),
    ] = 10.0
    eviction: Annotated[
        Literal["lru"],
        _field(
            "Which pages leave first when the pool is full. A page never leaves before those that follow it in its "
            "prefix.",
            '"lru" (least recently used)',
        ),
    ] = "lru"
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"],
        _field("Least severe message of this package that is logged.", '"DEBUG", "INFO", "WARNING" or "ERROR"'),
    ] = "INFO"
    sglang_takeover: Annotated[
        bool,
        _field(
            "SGLang's storage backend name `mooncake` means this package, for set-ups that can name no other. Read "
            "when SGLang starts, before its options are, so set it in the environment (`1`) or in the file.",
            "true or false",
        ),
    ] = False

    @property
    def effective_min_hit_tokens(self) -> int:
        """`min_hit_tokens`, or one page where it is not set."""
        return self.page_tokens if self.min_hit_tokens is None else self.min_hit_tokens


_FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}


def load_config(
    engine_json: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration in force. `environ` defaults to the process's environment.

    Raises ConfigError that names the source, the key, the value seen and what is allowed.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    file_name = environ.get(ENV_FILE, "")
    if file_name:
        values |= _checked(read_config_file(Path(file_name)), f"file {file_name}")
    values |= _from_environ(environ)
    if engine_json is not None:
        values |= _checked(engine_json, "the engine's JSON")
    return Config(**values)


def parse_nbytes(value: int | str) -> int:
    """A size in bytes from an integer or from text: "4096", "512MiB", "1.5GiB". Raises ValueError."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("expected an integer with an optional unit B, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def environ_name(field: str) -> str:
    """The environment variable that sets one field."""
    return ENV_PREFIX + field.upper()


def field_metadata(name: str) -> Meta:
    """Description, bounds and `extra` ("allowed") of one field of `Config`."""
    meta = _FIELDS[name].type.__metadata__[0]
    assert isinstance(meta, Meta)
    return meta


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable == ENV_FILE or environ[variable] == "":
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        source = f"environment variable {variable}"
        if name not in _FIELDS or variable != environ_name(name):
            known = [environ_name(field) for field in _FIELDS]
            raise ConfigError(f"{source} is unknown{_suggestion(variable, known)}")
        values[name] = _convert(name, environ[variable], source, strict=False)
    return values


def _checked(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    values = {}
    for name, value in given.items():
        if name not in _FIELDS:
            raise ConfigError(f"unknown configuration key {name!r} in {source}{_suggestion(str(name), list(_FIELDS))}")
        values[name] = _convert(name, value, f"{name} in {source}", strict=True)
    return values


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{hint}; known are {', '.join(known)}"


def _convert(name: str, value: Any, source: str, *, strict: bool) -> Any:
    """`value` as the field's type; text such as "64", "null" or "1.5" counts as a value where not `strict`."""
    if not strict and value == "null" and _FIELDS[name].default is None:
        return None
    try:
        return msgspec.convert(
            value, _FIELDS[name].type, strict=strict, dec_hook=lambda wanted, seen: _decode(wanted, seen, strict)
        )
    except (msgspec.ValidationError, ValueError, OverflowError):
        extra = field_metadata(name).extra or {}
        raise ConfigError(f"{source} is {value!r}: expected {extra['allowed']}") from None


def _decode(wanted: type, value: Any, strict: bool) -> Any:
    """msgspec's hook for the types it does not know; raises ValueError for what is not allowed."""
    if wanted is Path:
        return _decode_path(value)
    if not isinstance(value, int | str):
        raise ValueError("expected an integer or text")
    if wanted is Nbytes:
        nbytes = parse_nbytes(value)
        if not MIN_CAPACITY_NBYTES <= nbytes <= MAX_CAPACITY_NBYTES:
            raise ValueError("out of range")
        return Nbytes(nbytes)
    if strict and not isinstance(value, int):
        raise ValueError("expected an integer")
    tokens = int(value)
    if not 16 <= tokens <= 1024 or tokens & (tokens - 1):
        raise ValueError("not a power of two in range")
    return PageTokens(tokens)


def _decode_path(value: Any) -> Path:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("expected text")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # "~somebody" who does not exist
        raise ValueError(str(error)) from None
    if not path.is_absolute():
        raise ValueError("not absolute")
    return path
