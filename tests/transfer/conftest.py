"""Instances and pairs of them, which are closed after the test."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from causes import forget_causes
from certificates import make_certificate
from forked_process import Forked, forking
from simulated.cuda_driver import LIBRARY, Library
from simulated.gpudirect import cards_and_devices
from simulated.nodes import Instances
from simulated.pair import P_TABLE, Pair
from simulated.tls_process import helpers
from simulated.verbs import Fabric
from simulated.waiting import wait_for

from mooncake_connector import log
from transfer.transports import tls

TESTS = str(Path(__file__).parents[1])
TRANSPORTS = [
    "simulated.completion_queue", "simulated.cuda_driver", "simulated.library", "transfer.transports.cma",
    "transfer.transports.libraries.mooncake", "transfer.transports.libraries.nixl",
]  # fmt: skip
if find_spec("nixl"):
    TRANSPORTS.append("nixl._api")  # Mooncake's starts threads


@pytest.fixture(autouse=True)
def each_cause_is_logged_again() -> None:
    forget_causes()


@pytest.fixture(autouse=True, scope="session")
def processes_of_the_conformance_class_are_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each would take longer to import what it needs than most of its tests do. Those of `simulated` are started."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @cache
        def path() -> Path:
            return stack.enter_context(forking(tmp_path_factory.mktemp("forks"), *TRANSPORTS))

        patch.setattr("transfer.testing.fixtures.Process", lambda *arguments: Forked(path(), *arguments))
        yield


@pytest.fixture(autouse=True, scope="module")
def no_process_does_tls_any_more() -> Iterator[None]:
    """It ends with the last transport. Tests of other modules count children, threads and descriptors."""
    yield
    wait_for(lambda: all(thread.name != "mooncake-tls-process" for thread in threading.enumerate()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a peer, for TLS."""
    return make_certificate(tmp_path_factory.mktemp("ours"))


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test begins without a process that does TLS, and with nothing logged or counted."""
    monkeypatch.setattr(tls, "_process", tls.TlsProcess())
    monkeypatch.setattr(log, "_seen", set())
    yield
    try:
        wait_for(lambda: not helpers())
    finally:
        for pid in helpers():  # a test that failed left it, and no later one is to find it
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "mooncake-tls-process" not in [thread.name for thread in threading.enumerate()])  # it has logged


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The stand-in for CUDA's driver, without a past; other processes find it as well."""
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
    LIBRARY.__init__()
    yield LIBRARY
    assert not LIBRARY.contexts and not LIBRARY.locked and not LIBRARY._queues, "all is given back"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fabric]:
    """Cards, and devices whose memory they reach."""
    with cards_and_devices(monkeypatch, tmp_path) as fabric:
        yield fabric


@pytest.fixture
def make() -> Iterator[Any]:
    """Makers of prefill instances, which have a request's KV, and of decode instances with other blocks."""
    made: list[Instances] = []

    def prefill(tp_size: int = 1, **options: Any) -> Instances:
        made.append(Instances(tp_size, P_TABLE, **options))
        made[-1].fill()
        return made[-1]

    def decode(tp_size: int = 1, **options: Any) -> Instances:
        made.append(Instances(tp_size, [3, 0, 5, 1], block_tokens=12, order="BLHN", **options))
        return made[-1]

    yield prefill, decode
    for instances in made:
        instances.close()


@pytest.fixture
def make_pair() -> Iterator[Any]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
