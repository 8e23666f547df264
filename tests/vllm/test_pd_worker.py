"""What a rank makes of the scheduler's words and of its node's: one request at a time, each by its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_connector.config.schema import Config
from transfer.plan.granularity import Bounds
from transfer.plan.layout import Table
from transfer.protocol import orders
from transfer.protocol.incoming import Where
from transfer.protocol.orders import Ending, Transfer
from vllm_plugin.messages import Announcement, Ended, PDStep, StepMetadata, WorkerReport
from vllm_plugin.pd.worker import PDWorker, open_worker
from vllm_plugin.stats import ConnectorStats


class Node:
    """Writes down what it is told, and says what the test wants it to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.known: dict[str, Any] = {}
        """By name, the last one that it was told of."""
        self.reports: list[Any] = []
        self.counts: dict[str, dict[str, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda transfer, *args: self._tell(name, transfer)

    def _tell(self, verb: str, transfer: Transfer) -> None:
        self.told.append((verb, transfer.name))
        self.known[transfer.name] = transfer

    def take_ended(self) -> list[Any]:
        taken, self.reports = self.reports, []
        return taken

    def take_counts(self) -> dict[str, dict[str, int]]:
        taken, self.counts = self.counts, {}
        return taken

    def ends(self, name: str, ending: Ending) -> None:
        self.known[name].ending = ending
        self.reports.append(orders.Ended(self.known[name]))


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def worker(node: Any) -> PDWorker:
    sections: Any = SimpleNamespace(layers={}, last_layers=[(0, 1)])
    device: Any = SimpleNamespace(then=lambda call: call())
    return PDWorker(node, sections, Bounds(), device, ConnectorStats(), logs_requests=False, is_first_rank=True)


def step(**said: Any) -> StepMetadata:
    return StepMetadata(pd=PDStep(**said))


def announcement(transfer: str) -> Announcement:
    return Announcement(transfer, Where("127.0.0.1", 1), computed=True)


def ended(worker: PDWorker) -> Ended:
    ended = Ended()
    worker.take_ended(ended)
    return ended


def test_an_id_used_again_while_the_first_request_is_not_over(worker: PDWorker, node: Node) -> None:
    """vLLM tells of requests that its server refuses under the client's own id."""
    for _ in range(2):
        worker.start(step(announced={"chat": announcement("refused")}))
        worker.start(step(cancelled={"chat": "the request ended"}, unreported={"chat"}))
    worker.start(step(announced={"other": announcement("other")}))
    assert ended(worker) == Ended()
    node.reports = [orders.Failed(node.known[name]) for name in ("refused", "other")]
    node.ends("refused", Ending.FAILED)
    assert ended(worker) == Ended(report=WorkerReport(failed_transfers={"other"}))


def test_a_prefill_request_whose_id_is_used_again_while_the_first_one_is_not_over(worker: PDWorker, node: Node) -> None:
    worker.before_step(step(opened={"chat": "first"}))
    worker.start(step(cancelled={"chat": "the request ended"}, unreported={"chat"}))
    worker.before_step(step(opened={"chat": "second"}))
    worker.start(step(finished={"chat": 8}))
    node.ends("first", Ending.CANCELLED)
    assert ended(worker) == Ended(), "its blocks may still be read"
    node.ends("second", Ending.DONE)
    assert ended(worker) == Ended(sent={"chat"})


def test_a_request_that_is_dropped_after_its_transfer_ended_leaves_the_next_one_of_that_name_alone(
    worker: PDWorker, node: Node
) -> None:
    worker.start(step(announced={"first": announcement("same")}))
    first = node.known["same"]
    node.reports = [orders.Failed(first)]
    assert ended(worker) == Ended(report=WorkerReport(failed_transfers={"first"}))
    gone = {"cancelled": {"first": "the request ended"}, "unreported": {"first"}}
    worker.start(step(announced={"retry": announcement("same")}, **gone))
    assert node.told == [("announce", "same"), ("announce", "same"), ("cancel", "same")]
    assert node.known["same"] is first, "the one that is cancelled is the first one"


def test_what_cannot_be_done_for_one_request_is_done_for_the_others(
    worker: PDWorker, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    worker.before_step(step(preempted=["gone"], opened={"sent": "sent"}))
    said = step(announced={"other": announcement("other")}, granted={"gone": [Table(0, 8, [1])]})
    said.pd.finished = {"gone": 8, "sent": 8}
    worker.start(said)
    assert node.told == [("open", "sent"), ("awaited", "sent"), ("finished", "sent"), ("announce", "other")]
    assert len({record.getMessage() for record in caplog.records}) == 3, "each is said"
    caplog.clear()  # these were meant


def test_what_transports_count_is_in_the_statistics_by_figure_and_label(worker: PDWorker, node: Node) -> None:
    for nbytes in (5, 7):
        node.counts = {"rail_bytes": {"mlx5_0:1": nbytes, "mlx5_1:1": 1}, "rail_failures": {"mlx5_0:1": 1}}
        ended(worker)
    assert worker._stats.data == {"rail_bytes": {"mlx5_0:1": 12, "mlx5_1:1": 2}, "rail_failures": {"mlx5_0:1": 2}}


@pytest.mark.parametrize("sleeps", [False, True])
def test_cards_are_not_told_of_memory_that_sleep_mode_changes(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    """What is behind its addresses is another allocation after waking."""
    seen: list[Any] = []
    monkeypatch.setattr("vllm_plugin.pd.worker.Node", lambda *given: seen.append(given[3]))
    monkeypatch.setattr("vllm_plugin.pd.worker.RankSections", lambda memory: SimpleNamespace(layout=None))
    device = SimpleNamespace(type="cuda", index=0)
    memory: Any = SimpleNamespace(device=device, sleeps=sleeps, storages=[], record=lambda: None, is_first_rank=True)
    access: Any = None
    assert open_worker(memory, Config(), access, ConnectorStats()) is not None
    assert bool(seen[0].rdma.no_gpudirect) is sleeps
