"""vLLM servers, one for each connector, alike in everything else."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.client import Server
from mooncake_connector.cli.bench.serve.workload import Workload

MODEL_NAME = "model"
_START_DEADLINE_S = 600.0
_GRACE_S = 20.0
_SERVER_NBYTES = 1 << 30
"""What a server on the CPU takes beside weights and caches."""

_PROBE = """
import json, torch, vllm, vllm_plugin
device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"vllm": vllm.__version__, "torch": torch.__version__, "device": device}))
"""
_NEEDED = (
    "it needs vLLM and mooncake-connector; name a Python that has them by --vllm-python, or give the URL of a server "
    "that runs already instead of --model"
)


@dataclass(frozen=True)
class Environment:
    """An interpreter that has vLLM, what it runs on (None: the CPU), and its versions."""

    python: Path
    device: str | None
    versions: dict[str, str | None]


def probe(python: Path) -> Environment:
    """Raises BenchError that says what to install where vLLM or this package is missing."""
    python = Path(shutil.which(python) or python).absolute()  # servers start in folders of their own
    found = json.loads(processes.printed_by(python, _PROBE, _NEEDED)[-1])
    return Environment(python, found.pop("device"), found)


@dataclass(frozen=True)
class Place:
    """Where and how large a connector's cache may be."""

    python: Path
    folder: Path
    capacity_nbytes: int
    stack: contextlib.ExitStack
    """Ends what was started for the connector."""

    def log(self) -> IO[bytes]:
        return self.stack.enter_context(contextlib.closing(tempfile.TemporaryFile()))


@dataclass(frozen=True)
class Setup:
    """What vLLM is started with: `--kv-transfer-config` and environment."""

    transfer: dict[str, Any] | None = None
    env: dict[str, str] = field(default_factory=dict)


def transfer_config(name: str, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """`--kv-transfer-config` of a connector that keeps a cache."""
    found = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute", **more}
    return {**found, "kv_connector_extra_config": config} if config else found


def _ours(place: Place) -> Setup:
    config = {"pool": str(place.folder / "pool"), "capacity": place.capacity_nbytes}
    return Setup(transfer_config("MooncakeKVConnector", config))


ALONE, OURS = "vLLM alone", "mooncake-connector"
Connectors = Mapping[str, Callable[[Place], Setup]]
OWN: Connectors = {ALONE: lambda place: Setup(), OURS: _ours}


@dataclass(frozen=True)
class Shape:
    """A checkpoint as far as sizes go."""

    folder: Path
    vocabulary: int
    max_tokens: int
    dtype: str
    """As vLLM is told: "auto" is the checkpoint's own."""
    token_nbytes: int
    """KV of one token in all layers; never less than it is."""
    is_latent: bool


def read_shape(folder: Path, dtype: str = "auto") -> Shape:
    """From config.json. Raises BenchError where it cannot be read."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        config = {**config, **config.get("text_config", {})}
        for name in ("num_hidden_layers", "num_attention_heads", "vocab_size"):
            if not isinstance(config[name], int) or config[name] < 1:
                raise ValueError(f"{name} is {config[name]!r:.40}, and not a whole number above 0")
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        latent = config.get("kv_lora_rank")
        width = latent + config["qk_rope_head_dim"] if latent else None
        head = config.get("head_dim") or config["hidden_size"] // heads
        values = width or 2 * (config.get("num_key_value_heads") or heads) * head
        longest = config.get("max_position_embeddings", 1 << 20)
        own = config.get("dtype") or config.get("torch_dtype")
        itemsize = 4 if dtype == "float32" or (dtype, own) == ("auto", "float32") else 2
        return Shape(folder, config["vocab_size"], longest, dtype, itemsize * layers * values, bool(latent))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        message = f"--model {folder}: {path.name} cannot be used ({reason}): name a checkpoint's folder"
        raise BenchError(message) from error


@dataclass(frozen=True)
class Memory:
    """The engine's own cache, so small that it holds about a third of the prefixes if the requests at a time fit."""

    block_tokens: int
    blocks: int
    max_tokens: int
    capacity_nbytes: int
    """For each connector: all prompts of all rounds, and half as much again."""
    share: float
    """Of the prefixes, how much the cache has room for."""

    @classmethod
    def of(cls, shape: Shape, work: Workload, on_cpu: bool) -> Memory:
        """Raises BenchError where the model is too short for the requests."""
        work.check_fits(shape.max_tokens, "the model's")
        block = 128 if on_cpu and not shape.is_latent else 16
        request = math.ceil(work.request_tokens / block)
        prefixes = work.prefixes * math.ceil(work.prefix_tokens / block)
        blocks = max(math.ceil(prefixes / 3), request * work.concurrency)
        longest = min(request * block, shape.max_tokens)
        tokens = work.rounds * (work.prefixes * work.prefix_tokens + work.requests * 128)
        nbytes = max(256 << 20, tokens * shape.token_nbytes * 3 // 2)
        return cls(block, blocks + 1, longest, nbytes, min(1.0, blocks / prefixes))  # vLLM keeps one block empty


class Engine:
    """One running server of vLLM, and what ended it if it ended."""

    def __init__(self, name: str, server: Server, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name, self.server = name, server
        self._process, self._log = process, log

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask_to_end(self) -> None:
        if self.is_alive:
            self._process.terminate()

    def reason(self) -> str:
        """What its log says of its end."""
        return failure_in(self._log)


@contextlib.contextmanager
def start(
    connectors: Connectors, environment: Environment, shape: Shape, memory: Memory, folder: Path
) -> Iterator[tuple[list[Engine], dict[str, str]]]:
    """Servers with these connectors, all at once; those that do not come up, with the reason of each."""
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        running: list[Engine] = []
        waiting: list[Engine] = []
        cores = len(os.sched_getaffinity(0))  # so many start at a time
        for name, set_up in connectors.items():
            place_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-serve-", dir=folder)))
            place = Place(environment.python, place_folder, memory.capacity_nbytes, stack)
            try:
                setup = set_up(place)
            except (BenchError, OSError) as error:
                absent[name] = str(error)
                continue
            waiting.append(_launch(name, setup, environment, shape, memory, place, stack))
            if len(waiting) == cores:
                running += [engine for engine in waiting if _comes_up(engine, absent)]
                waiting = []
        running += [engine for engine in waiting if _comes_up(engine, absent)]
        for engine in running:
            stack.callback(engine.ask_to_end)  # all at once, before each is waited for
        yield running, absent


def _launch(
    name: str, setup: Setup, environment: Environment, shape: Shape, memory: Memory, place: Place,
    stack: contextlib.ExitStack,
) -> Engine:  # fmt: skip
    (port,) = processes.free_ports(1)
    log = place.log()
    command = _command(environment, shape, memory, port, setup.transfer)
    env = {**_environment(memory, shape), **setup.env}
    process = stack.enter_context(processes.running(command, log, env, grace_s=0, leave_s=_GRACE_S, cwd=place.folder))
    return Engine(name, Server("127.0.0.1", port), process, log)


def _comes_up(engine: Engine, absent: dict[str, str]) -> bool:
    deadline = time.monotonic() + _START_DEADLINE_S
    while time.monotonic() < deadline:
        if not engine.is_alive:
            absent[engine.name] = engine.reason()
            return False
        if engine.server.is_healthy():
            return True
        time.sleep(0.2)
    absent[engine.name] = f"did not start within {_START_DEADLINE_S:.0f} s; its log: {engine.reason()}"
    engine.ask_to_end()
    return False


def _environment(memory: Memory, shape: Shape) -> dict[str, str]:
    cache_nbytes = memory.blocks * memory.block_tokens * shape.token_nbytes
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(cache_nbytes / (1 << 30))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_WAIT_POLICY": "PASSIVE",  # a server that waits for its turn takes no core
    }


def _command(
    environment: Environment, shape: Shape, memory: Memory, port: int, transfer: dict[str, Any] | None
) -> list[str]:
    return [
        *vllm_command(environment.python, shape.folder, port, transfer),
        *("--dtype", shape.dtype, "--max-model-len", str(memory.max_tokens), "--block-size", str(memory.block_tokens)),
        *("--num-gpu-blocks-override", str(memory.blocks)),
        *(("--enforce-eager",) if environment.device is None else ()),
    ]


def vllm_command(python: Path, model: Path, port: int, transfer: dict[str, Any] | None) -> list[str]:
    """A server on the loopback interface; as a module, since the `vllm` command of the CPU build does not start."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.resolve())),
        *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)),
        "--disable-uvicorn-access-log",
        *(("--kv-transfer-config", json.dumps(transfer)) if transfer is not None else ()),
    ]


def fits_at_once(shape: Shape, memory: Memory, count: int) -> bool:
    """Whether the main memory has room for that many servers on the CPU, each with the cache of its connector."""
    weights = sum(path.stat().st_size for path in shape.folder.glob("*.safetensors"))
    each = weights * 3 // 2 + memory.capacity_nbytes + memory.blocks * memory.block_tokens * shape.token_nbytes
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        available = int(found[1]) << 10 if found else available
    return count * (each + _SERVER_NBYTES) < available


_ERROR = re.compile(r"\b([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)(?::[ \t].+)?)$")
_FOLLOWS = ("Engine core initialization failed", "WorkerProc initialization failed", "cancelled")


def failure_in(log: IO[bytes]) -> str:
    """The first error in a server's log that is no consequence of another; else its last line."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()
    for line in lines:
        found = _ERROR.search(line.rstrip())
        if found and ": " in found[1] and not any(text in found[1] for text in _FOLLOWS):
            return found[1][:200]
    for line in reversed(lines):
        if line.strip():
            return line.strip()[:200]
    return "it ended and said nothing"
