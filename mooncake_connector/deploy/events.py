"""Ports at which the instances of a deployment publish their KV events: one `--kv-events-config` is for all of them."""

from __future__ import annotations

import itertools
import json
import re

from mooncake_connector.errors import ConfigError

_FLAG = "--kv-events-config"
_ENDPOINT = re.compile(r"(tcp://.+):([1-9][0-9]{0,4})")


def with_own_ports(flags: tuple[str, ...], taken: set[int]) -> tuple[tuple[str, ...], dict[str, int]]:
    """The flags of one instance with the next ports that are not `taken`, to which they are added; and these ports by
    the names of the endpoints. As they are where no port is listened at, or the value is no JSON. Raises ConfigError.
    """
    at = next((at for at in reversed(range(len(flags))) if flags[at].partition("=")[0] == _FLAG), None)
    if at is None:
        return flags, {}
    head, _, text = flags[at].partition("=")
    at += 0 if text else 1
    try:
        config = json.loads(text or flags[at])
        found = {name: _ENDPOINT.fullmatch(config.get(name) or "") for name in ("endpoint", "replay_endpoint")}
    except (ValueError, IndexError, AttributeError, TypeError):
        return flags, {}  # the engine says what is wrong
    listening = {name: match for name, match in found.items() if match}
    if "endpoint" not in listening or not re.search(r"\*|::", listening["endpoint"][1]):
        return flags, {}  # to an address engines connect
    first = {name: int(match[2]) for name, match in listening.items()}
    further = next(more for more in itertools.count() if taken.isdisjoint(port + more for port in first.values()))
    ports = {name: port + further for name, port in first.items()}
    if max(ports.values()) > 65535:
        raise ConfigError(f"{_FLAG} has port {max(first.values())}, and up to 65535 there is none for each instance")
    taken.update(ports.values())
    if further:
        config |= {name: f"{match[1]}:{ports[name]}" for name, match in listening.items()}
        value = json.dumps(config, separators=(",", ":"))
        flags = (*flags[:at], f"{head}={value}" if text else value, *flags[at + 1 :])
    return flags, ports
