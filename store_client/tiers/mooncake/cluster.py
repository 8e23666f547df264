"""The processes of a Mooncake cluster on this machine: one master, and nodes that hold the memory."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from mooncake_connector.deploy.commands import Command
from mooncake_connector.errors import ConfigError

LOOPBACK = "127.0.0.1"
_PORTS = range(22000, 32000)  # Mooncake itself chooses from 12300 to 17000
NEEDS = (
    "pip install 'mooncake-connector[mooncake]', and with apt-get libibverbs1 libnuma1 librdmacm1 liburing2 libcurl4"
)


def commands(nodes: int, node_nbytes: int) -> list[Command]:
    """The master, then the nodes; ports are free ones of now. Raises ConfigError where the wheel is missing."""
    ports = free_ports(2 + 2 * nodes)
    master = master_command(ports[0], ports[1])
    rest = iter(ports[2:])
    return [master, *(node_command(number, ports[0], next(rest), next(rest), node_nbytes) for number in range(nodes))]


def master_command(port: int, http_port: int, *flags: str) -> Command:
    """Args: `flags`: further ones of mooncake_master, such as those of an election."""
    arguments = (
        program("mooncake_master"), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}", f"--metrics_host={LOOPBACK}",
        f"--metrics_port={http_port}", "--logtostderr=true", *flags,
    )  # fmt: skip
    listens = ((LOOPBACK, port), (LOOPBACK, http_port))
    return Command("master", "master", arguments, {}, f"http://{LOOPBACK}:{http_port}", listens)


def node_command(number: int, master: int | str, port: int, http_port: int, nbytes: int) -> Command:
    """Args: `master`: its port on this machine, or the connection string of an election."""
    at = f"{LOOPBACK}:{master}" if isinstance(master, int) else master
    arguments = (
        program("mooncake_client"), f"--host={LOOPBACK}", f"--port={port}", f"--global_segment_size={nbytes}",
        "--metadata_server=P2PHANDSHAKE", f"--master_server_address={at}", "--protocol=tcp",
        "--enable_http_server=true", f"--http_port={http_port}", "--logtostderr=true",
    )  # fmt: skip
    listens = ((LOOPBACK, port), ("0.0.0.0", http_port))
    return Command(
        f"node-{number}", "node", arguments, {"MC_FORCE_TCP": "1"}, f"http://{LOOPBACK}:{http_port}", listens
    )


def program(name: str) -> str:
    """The path of a program of Mooncake's wheel. Raises ConfigError where it is not installed."""
    found = find_spec("mooncake")
    for folder in found.submodule_search_locations or () if found else ():
        if (path := Path(folder) / name).is_file():
            return str(path)
    raise ConfigError(f"{name} is not installed beside this Python: {NEEDS}")


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on right now, below those that Linux gives to whoever asks for any."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with suppress(OSError):
            socket.create_server(("", port)).close()
            found.append(port)
        if len(found) == count:
            return found
    raise ConfigError(f"there are no {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")
