"""Fixtures for PD disaggregation on real servers.

Tests share three groups of servers, which `Fleet` runs one after the other: `trio` on one host, `hosts` apart in two
network namespaces, and `ranks` of different TP sizes. The modules' names keep tests of one group together. The last
group stops after the last test that uses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from certificates import CAN_MAKE, make_certificate

from e2e.network import Host, Link, NoNamespaces, hosts_apart
from e2e.pd.chat import CHAT_TEMPLATE, Chatting, draw_letters
from e2e.pd.fleet import Fleet, Group
from e2e.pd.instances import Instance
from e2e.process import pool_folder, running
from e2e.questions import Examiner, Question
from e2e.server import ONE_CORE, Server

CHUNK_TOKENS, LAYER_TOKENS = 200, 600
BOUNDS = {"granularity_chunk_tokens": CHUNK_TOKENS, "granularity_layer_tokens": LAYER_TOKENS}
GRANULARITIES = ("full", "chunk", "layer")
ORDERS = ("sequential", "concurrent")
TRANSPORTS = {"cma": (0, 1), "shm": (1, 2), "tcp": (2, 0)}
"""Transport -> which of the trio prefills, and which decodes."""
LEASE_S = 10
MEMORY = ("--num-gpu-blocks-override", "64")  # all of it is soon in use, so that a process does not grow by it
STEADY = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "LRU_CACHE_CAPACITY": "16",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""Little grows by itself: oneDNN keeps code for few batch sizes, glibc keeps little of what was freed."""
LENGTHS = {
    "full": 150,
    "chunk": 450,
    "layer": 1100,
    "below a block": 100,
    "shared": 640,
    "two to one": 450,
    "one to two": 450,
    **{f"crowd {number}": 130 + 41 * number for number in range(8)},
    **{f"host {number}": 300 for number in range(6)},
}
COMMON = ("--max-model-len", "4096", "--chat-template", CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def asked(qwen3: Path, logs: Path) -> dict[str, Question]:
    """Questions for the Qwen3 checkpoint by name, answered by vLLM without the connector or a hit."""
    plain = Server(qwen3, log=logs / "pd-plain.log", args=COMMON, env=ONE_CORE)
    with running(plain):
        examiner = Examiner(plain)
        found = {name: examiner.question(name, length) for name, length in LENGTHS.items()}
        found["shared/more"] = examiner.question("shared/more", 1000, prefix=found["shared"].prompt)
        found["chat"] = Examiner(Chatting(plain), draw=draw_letters).question("chat", 300)
        return found


@pytest.fixture(scope="session")
def fleet(stops: dict[str, Callable[[], None]]) -> Fleet:
    fleet = Fleet()
    stops["fleet"] = fleet.close
    return fleet


class Trio(Group):
    """Three instances of which each two have one transport in common, and which cut prompts into different chunks."""

    def pair(self, transport: str) -> tuple[Instance, Instance]:
        prefill, decode = TRANSPORTS[transport]
        return self.instances[prefill], self.instances[decode]

    def third(self, *others: Instance) -> Instance:
        (third,) = (instance for instance in self.instances if instance not in others)
        return third


@pytest.fixture
def trio(
    asked: dict[str, Question],
    fleet: Fleet,
    qwen3: Path,
    logs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trio:
    """All three have nothing cached and no fault. Those with tcp are reached over it, the other one by Unix sockets."""

    def make() -> Trio:
        times = {"transfer_deadline_s": 60, "transfer_lease_s": LEASE_S}
        secret = str(make_secret(tmp_path_factory))
        kinds = [(["cma", "tcp"], 512), (["cma", "shm"], 4096), (["shm", "tcp"], 256)]
        instances = [
            Instance(
                qwen3,
                log=logs / f"pd-trio-{number}.log",
                pool=logs / "no-pool",
                config={**BOUNDS, **times, "transports": transports, "secret_file": secret},
                args=[*MEMORY, *COMMON, "--max-num-batched-tokens", str(chunk)],
                env=STEADY,
                transfer_host="127.0.0.1" if "tcp" in transports else "",
            )
            for number, (transports, chunk) in enumerate(kinds)
        ]
        return Trio(instances, logs)

    group = fleet.use("trio", make)
    assert isinstance(group, Trio)
    return group


def make_secret(folders: pytest.TempPathFactory) -> Path:
    secret = folders.mktemp("secret") / "secret"
    secret.touch(mode=0o600)
    secret.write_text("as long as it has to be, and longer")
    return secret


class Hosts(Group):
    """A prefill and a decode instance with a pool each, in network namespaces where those can be made, and with TLS."""

    def __init__(self, prefill: Instance, decode: Instance, link: Link | None, logs: Path) -> None:
        super().__init__([prefill, decode], logs)
        self.prefill, self.decode = prefill, decode
        self._link = link

    @property
    def link(self) -> Link:
        """What KV travels over; tests that need it are skipped where there is none."""
        if self._link is None:
            pytest.skip("NOT TESTED: network namespaces and TUN devices need root, `ip` and /dev/net/tun")
        return self._link

    def forget(self) -> None:
        if self._link is not None:
            self._link.set()
        super().forget()


@pytest.fixture(scope="session")
def network() -> Iterator[tuple[list[Host], Link] | None]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(hosts_apart(2))
        except NoNamespaces:
            found = None
        yield found


@pytest.fixture
def hosts(
    asked: dict[str, Question],
    fleet: Fleet,
    qwen3: Path,
    logs: Path,
    network: tuple[list[Host], Link] | None,
    pools: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Hosts:
    """Both have nothing cached and no fault, and the link is whole; their pools keep what is in them."""

    def make() -> Hosts:
        secret = make_secret(tmp_path_factory)
        files = make_certificate(tmp_path_factory.mktemp("tls")) if CAN_MAKE else {}
        tls = {f"tls_{role}": path for role, path in files.items()}

        def instance(number: int, pool: Path) -> Instance:
            apart = {"transfer_host": "127.0.0.1"} if network is None else {
                "host": network[0][number].control,
                "transfer_host": network[0][number].data,
                "launcher": network[0][number].launcher,
                "env": network[0][number].env,
            }  # fmt: skip
            config = {
                "prefix_reuse": True,
                "log_requests": True,
                "capacity": "256MiB",
                "secret_file": str(secret),
                "transports": ["tcp"],
                "granularity_layer_tokens": CHUNK_TOKENS,
                "granularity_chunk_tokens": CHUNK_TOKENS,
                "transfer_deadline_s": 40,
                "transfer_lease_s": LEASE_S,
                **tls,
            }
            args = ["--max-model-len", "2048", "--max-num-batched-tokens", "256"]
            log = logs / f"pd-host-{number}.log"
            return Instance(qwen3, log=log, pool=pool, config=config, args=args, **apart)  # type: ignore[arg-type]

        prefill, decode = (instance(number, pool) for number, pool in enumerate(pools))
        return Hosts(prefill, decode, network and network[1], logs)

    group = fleet.use("hosts", make)
    assert isinstance(group, Hosts)
    return group


@pytest.fixture(scope="session")
def pools() -> Iterator[tuple[Path, Path]]:
    with pool_folder() as one, pool_folder() as two:
        yield one, two


class Ranks(Group):
    """One instance of two ranks, and one of one. Neither computes what the other one should have."""


@pytest.fixture
def ranks(asked: dict[str, Question], fleet: Fleet, qwen3: Path, logs: Path) -> Ranks:
    def make() -> Ranks:
        instances = [
            Instance(
                qwen3,
                log=logs / f"pd-tp{tp_size}.log",
                pool=logs / "no-pool",
                config={"granularity": granularity, "transfer_deadline_s": 60, "transfer_failure": "fail"},
                args=["--max-model-len", "2048", "--tensor-parallel-size", str(tp_size)],
            )
            for tp_size, granularity in ((2, "layer"), (1, "chunk"))
        ]
        return Ranks(instances, logs)

    group = fleet.use("ranks", make)
    assert isinstance(group, Ranks)
    return group
