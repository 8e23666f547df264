"""Engines for the tests of the vLLM connector; see harness.py. Runs where vLLM is installed, starts no process."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import settings
from cases import RUNNERS
from causes import forget_causes
from faults import Faults, faulty_opening
from harness import Engine
from hosts import Host, client, shared_folder
from long_form import LONG
from pd import Pair
from proxied import LIMIT_S, Proxied
from settings import Setup
from simulated.waiting import wait_for

import store_client.open
import vllm_plugin
import vllm_plugin.kv_memory
import vllm_plugin.prefix.saver
from store_client.open import BackgroundStore

PARAM = type(pytest.param())

vllm_plugin.register()  # what vLLM's plugin loader does in a process of its own


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the runners four are run, and of a test over them and over other values every second combination, so that
    each runner is, and each other value, and of three each two together; so is it with any three lists of values. All
    of them are in the long form."""
    others = {item for item in items if is_for_the_long_form(item)}
    if LONG:
        for item in others:
            item.add_marker(pytest.mark.long)
        return
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def is_for_the_long_form(item: pytest.Item) -> bool:
    """By the places of its values in the lists that they are from."""
    if not hasattr(item, "callspec"):
        return False
    has_runners = "runner" in item.callspec.params
    if has_runners and item.callspec.params["runner"] is RUNNERS[-1].values[0]:
        return True
    values, places = dict(item.callspec.params), []
    for mark in item.iter_markers("parametrize"):
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        mine = tuple(values.pop(name) for name in names)
        rows = [row.values if isinstance(row, PARAM) else row if len(names) > 1 else (row,) for row in mark.args[1]]
        places.append(next((at for at, row in enumerate(rows) if all(map(operator.is_, row, mine))), 0))
    places += [item.callspec.indices[name] for name in values]  # of fixtures
    return len(places) > (1 if has_runners else 2) and sum(places) % 2 == 1


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return settings.base_config(tmp_path_factory.mktemp("model"))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Every pool that opens during the test is the real one behind these faults."""
    faults = Faults()
    monkeypatch.setattr(store_client.open, "open_store", faulty_opening(faults, store_client.open.open_store))
    return faults


@pytest.fixture(autouse=True)
def _like_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended KV cache keeps K beside V, as on accelerators; CPU packing has tests of its own."""
    monkeypatch.setattr(vllm_plugin.kv_memory, "probe_cpu_order", lambda *args: None)
    forget_causes()


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine all of this lasts longer than an engine cares to wait."""
    for name in (
        "store_client.jobs._LOCK_WAIT_S",
        "vllm_plugin.adapter_files._FIRST_LOOK_S",
        "vllm_plugin.adapter_files._LOOK_S",
        "vllm_plugin.naming._FIRST_WAIT_S",
        "vllm_plugin.prefix.save_planner._COLLECT_S",
        "vllm_plugin.prefix.lookups._LOOKUP_HANGS_S",
    ):
        monkeypatch.setattr(name, 60.0)
    first_attempt = BackgroundStore.wait
    monkeypatch.setattr(BackgroundStore, "wait", lambda store, timeout_s: first_attempt(store, 60.0))


@pytest.fixture(autouse=True)
def _no_error_is_hidden(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What the connector keeps from the engine, and what fails in its event loops, is a defect all the same."""
    yield
    if request.path.name.startswith("test_pd"):
        records = [*caplog.get_records("setup"), *caplog.get_records("call")]
        hidden = [
            one.getMessage() for one in records if one.exc_info or (one.name, one.levelname) == ("asyncio", "ERROR")
        ]
        assert not hidden, hidden


@pytest.fixture
def pair(start: Callable[..., Engine]) -> Callable[..., Pair]:
    """A prefill and a decode instance without a pool: `pair(prefill={...}, decode={...}, granularity=...)`."""

    def start_both(
        prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, pool: bool = False, **extra: Any
    ) -> Pair:
        engines = []
        for side in (prefill or {}, decode or {}):
            own = side.get("extra", {})
            engines.append(start(**side | {"extra": {"prefix_reuse": pool} | extra | own}))
        return Pair(*engines)

    return start_both


@pytest.fixture
def runner() -> dict[str, bool]:
    """Which of vLLM's model runners and schedulers the engines of a test have; see `cases.every_runner`."""
    return {}


@pytest.fixture
def start(base_config: Any, pool: Path, faults: Faults, runner: dict[str, bool]) -> Iterator[Callable[..., Engine]]:
    """Start an engine over this test's pool: `start(page_tokens=64, ...)`, see `Setup`."""
    engines: list[Engine] = []

    def start_one(**settings: Any) -> Engine:
        engine = Engine(Setup(**runner | settings), base_config, pool)
        engines.append(engine)
        return engine

    yield start_one
    faults.release()
    for engine in engines:
        engine.shut_down()


@pytest.fixture(params=[True, False], ids=["room-aside", "no-room"])
def aside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether pages can be copied aside when their blocks are given away."""
    if not request.param:
        monkeypatch.setattr(vllm_plugin.prefix.saver, "_ASIDE_NBYTES", 0)
    return bool(request.param)


@pytest.fixture
def proxied() -> Iterator[Callable[..., Proxied]]:
    made: list[Proxied] = []

    def make(*arguments: str, **more: Any) -> Proxied:
        made.append(Proxied(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.process.terminate()
        assert one.process.wait(LIMIT_S) in (0, -15)


@pytest.fixture
def host(start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(name, **settings)`: an engine with a pool of its own, whose agent knows the folder that all share."""
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 60.0)
    monkeypatch.setattr("store_client.agent.source.is_worth_it", lambda *args: True)  # nothing here takes time
    monkeypatch.setattr("store_client.agent.client._SILENT_S", 60.0)
    monkeypatch.setattr("store_client.jobs._HEARING_S", 60.0)
    folder = shared_folder(tmp_path / "shared")

    def start_one(name: str, **settings: Any) -> Engine:
        extra = {"pool": str(tmp_path / name)} | folder | settings.pop("extra", {})
        engine = start(**settings, extra=extra)
        wait_for(lambda: client(engine).ready)
        return engine

    return start_one
