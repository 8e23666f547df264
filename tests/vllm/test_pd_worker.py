"""What a rank makes of the scheduler's words and of its node's: one request at a time, each by its own."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_connector.kv.geometry import Shard
from transfer.driver import Ended
from transfer.fetching import Where
from transfer.plan.granularity import Bounds
from transfer.protocol.orders import Ending
from vllm_plugin.messages import Announcement, FetchJob, PDStep
from vllm_plugin.pd.worker import PDWorker, Results
from vllm_plugin.stats import ConnectorStats


class Node:
    """Writes down what it is told, and says what the test wants it to."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.sent: list[Ended] = []
        self.fetched: list[Ended] = []

    def __getattr__(self, name: str) -> Any:
        return lambda transfer, *args, **kwargs: self.told.append((name, transfer))

    def take_sent(self) -> list[Ended]:
        taken, self.sent = self.sent, []
        return taken

    def take_fetched(self) -> list[Ended]:
        taken, self.fetched = self.fetched, []
        return taken


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def worker(node: Any) -> PDWorker:
    layout: Any = SimpleNamespace(shard=Shard(0, 2, 0, 1))
    device: Any = SimpleNamespace(lock=threading.Lock(), then=lambda call: call())
    return PDWorker(node, layout, 0, [], Bounds(), device)


def announcement(transfer: str) -> Announcement:
    return Announcement(transfer, Where("127.0.0.1", 1), computed=True)


def results(worker: PDWorker) -> Results:
    return worker.take_results(ConnectorStats())


def test_an_id_used_again_while_the_first_request_is_not_over(worker: PDWorker, node: Node) -> None:
    """vLLM tells of requests that its server refuses under the client's own id."""
    for _ in range(2):
        worker.start(PDStep(announced={"chat": announcement("refused")}))
        worker.start(PDStep(dropped={"chat": "the request ended"}))
    worker.start(PDStep(announced={"other": announcement("other")}))
    assert results(worker) == Results()
    node.fetched = [Ended(name, Ending.FAILED, "nobody answers") for name in ("refused", "other")]
    assert results(worker) == Results(unfetched={"other"})


def test_a_prefill_leg_whose_id_is_used_again_while_the_first_one_is_not_over(worker: PDWorker, node: Node) -> None:
    worker.prepare(PDStep(opened={"chat": "first"}))
    worker.start(PDStep(cancelled={"chat": "the request ended"}, unreported={"chat"}))
    worker.prepare(PDStep(opened={"chat": "second"}))
    worker.start(PDStep(finished={"chat": 8}))
    node.sent = [Ended("first", Ending.CANCELLED)]
    assert results(worker) == Results(), "its blocks may still be read"
    node.sent = [Ended("second", Ending.DONE)]
    assert results(worker) == Results(sent={"chat"})


def test_a_request_that_is_dropped_after_its_transfer_ended_leaves_the_next_one_of_that_name_alone(
    worker: PDWorker, node: Node
) -> None:
    worker.start(PDStep(announced={"first": announcement("same")}))
    node.fetched = [Ended("same", Ending.FAILED, "the prefill instance is gone")]
    assert results(worker) == Results(unfetched={"first"})
    worker.start(PDStep(announced={"retry": announcement("same")}, dropped={"first": "the request ended"}))
    assert node.told == [("announce", "same"), ("announce", "same")]


def test_what_cannot_be_done_for_one_request_is_done_for_the_others(
    worker: PDWorker, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    worker.prepare(PDStep(preempted=["gone"], opened={"sent": "sent"}))
    step = PDStep(announced={"other": announcement("other")}, fetched={"gone": FetchJob(0, 8, [1])})
    step.finished = {"gone": 8, "sent": 8}
    worker.start(step)
    assert node.told == [("open", "sent"), ("finished", "sent"), ("announce", "other")]
    assert len({record.getMessage() for record in caplog.records}) == 3, "each is said"
    caplog.clear()  # these were meant
