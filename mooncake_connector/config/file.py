"""Reads a configuration file, TOML or YAML by its suffix; what the keys mean is `config`'s work.

A file that was broken on purpose costs no more time and memory than another: it is small, and YAML has neither anchors
nor depth.
"""

import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import yaml

from mooncake_connector.errors import ConfigError
from mooncake_connector.log import printable
from mooncake_connector.sizes import human_nbytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_NBYTES = 64 << 10
_MAX_DEPTH = 8
_MAX_DOTS = 16
_KEY = re.compile(r"\s*(?:\[\s*)*(?:\"([^\"]+)\"|'([^']+)'|([\w-]+))\s*[=.\]]")
_TOML = {".toml"}
_YAML = {".yaml", ".yml"}


def read_config_file(path: Path) -> dict[Any, tuple[Any, int | None]]:
    """The value of each key of the file, and the line on which it is where that is known.

    Raises ConfigError for a file that cannot be read or parsed, or that holds something else than keys with values.
    """
    suffix = path.suffix.lower()
    named = f"configuration file {printable(str(path))} (from MOONCAKE_CONNECTOR_CONFIG)"
    if suffix not in _TOML | _YAML:
        raise ConfigError(f"{named} has suffix {suffix!r}: expected .toml, .yaml or .yml")
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{named} cannot be read: {reason}") from None
    try:
        return _toml(text) if suffix in _TOML else _yaml(text)
    except ValueError as error:
        kind = "TOML" if suffix in _TOML else "YAML"
        raise ConfigError(f"configuration file {path} is not valid {kind}: {error}") from None


def read_text(path: Path, most_nbytes: int = MAX_FILE_NBYTES) -> str:
    """Raises OSError, and ValueError for what is no text file of at most so many bytes."""
    # A pipe would block without O_NONBLOCK until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"it has more than {human_nbytes(most_nbytes)}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8") from None


def _toml(text: str) -> dict[Any, tuple[Any, int | None]]:
    # Each dot of a key costs the parser as much as all before it.
    dotted = re.search(rf"[\w\"'-]\s*(?:\.\s*[\w\"'-]+\s*){{{_MAX_DOTS}}}", text)
    if dotted:
        raise ValueError(f"a key with more than {_MAX_DOTS} dots (line {_line(text, dotted.start())})")
    _check_brackets(text)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python's limit on the digits of a number
        digits = re.search(r"^(.*?)[0-9][0-9_]{999}", text, re.MULTILINE)
        place = f"{digits[1][:80]!a} (line {_line(text, digits.start())}): " if digits else ""
        raise ValueError(f"{place}{error}") from None
    lines = _toml_lines(text)
    return {key: (value, lines.get(key)) for key, value in content.items()}


def _check_brackets(text: str) -> None:
    """Before the parser recurses, which some builds of it do without a limit."""
    depth = 0
    for bracket in re.finditer(r"[][{}]", text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        if depth > _MAX_DEPTH:
            raise ValueError(f"brackets are nested too deep (line {_line(text, bracket.start())})")


def _toml_lines(text: str) -> dict[str, int]:
    """The line of each key where it is first; once over the file, however many keys it has."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        found = _KEY.match(line)
        if found:
            lines.setdefault(found[1] or found[2] or found[3], number)
    return lines


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Loader(yaml.SafeLoader):
    """YAML without what makes a small file large: aliases and depth."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) is not None:
            raise _at(event.start_mark, "anchors and aliases (& and *) are not supported")
        if self._depth >= _MAX_DEPTH:
            raise _at(event.start_mark, "brackets are nested too deep")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _yaml(text: str) -> dict[Any, tuple[Any, int | None]]:
    loader, root = parse_yaml(text)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "text"
        raise ValueError(f"it holds {found}: expected keys with values")
    return {key: (value_of(loader, node, str(key)[:80]), line) for key, (node, line) in entries(loader, root).items()}


def parse_yaml(text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """The tree of a document, with what makes values of its nodes. Raises ValueError."""
    try:
        loader = _Loader(text)
        return loader, loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character #x{error.character:04x} (line {_line(text, error.position)})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise (_at(mark, error.problem or error.context or "") if mark else ValueError(str(error))) from None


def entries(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, tuple[yaml.Node, int]]:
    """The value's node and the line of each key. Raises ValueError."""
    found: dict[Any, tuple[yaml.Node, int]] = {}
    for key_node, value_node in node.value:
        key = value_of(loader, key_node, "a key")
        if not isinstance(key, str | int | float | bool | None):
            raise _at(key_node.start_mark, "a key is no text")
        if key in found:
            raise _at(key_node.start_mark, f"the key {str(key)[:80]!r} is there twice")
        found[key] = value_node, key_node.start_mark.line + 1
    return found


def value_of(loader: yaml.SafeLoader, node: yaml.Node, what: str) -> Any:
    """Raises ValueError."""
    try:
        return loader.construct_object(node, deep=True)
    except Exception as error:  # its constructors raise what the text happens to make them trip over
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else f"{type(error).__name__}: {error}"
        raise _at(node.start_mark, f"{what!a}: {str(reason)[:200]}") from None


def _at(mark: yaml.Mark, problem: str) -> ValueError:
    return ValueError(f"{problem} (line {mark.line + 1}, column {mark.column + 1})")
