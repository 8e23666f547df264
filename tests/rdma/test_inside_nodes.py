"""A prefill and a decode instance hand over KV by rdma: the connector's own nodes, as its workers drive them.

Their memory is that of numpy: the machine's processor is emulated, and takes minutes to import torch, as
`test_inside_tensors` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from simulated.nodes import Instances, endings
from simulated.pair import D_TABLE, P_TABLE

from transfer.plan.granularity import Bounds, Granularity
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions

pytestmark = pytest.mark.inside


def options(granularity: Granularity) -> NodeOptions:
    return NodeOptions(page_tokens=16, bounds=Bounds(fixed=granularity), transports=["rdma"], hosts=["127.0.0.1"])


@contextmanager
def instances_of() -> Iterator[Callable[..., Instances]]:
    """Makes some, which are closed at the end."""
    made: list[Instances] = []

    def instances(*args: Any, **more: Any) -> Instances:
        made.append(Instances(*args, **more))
        return made[-1]

    try:
        yield instances
    finally:
        for one in made:
            one.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Instances]]:
    with instances_of() as make:
        yield make


@pytest.mark.parametrize(
    ("granularity", "sources", "targets"),
    [(Granularity.LAYER, 1, 1), (Granularity.FULL, 1, 1), (Granularity.CHUNK, 2, 1), (Granularity.LAYER, 1, 2)],
)
def test_kv_is_handed_over_by_rdma_and_nothing_else(
    make: Callable[..., Instances], granularity: Granularity, sources: int, targets: int
) -> None:
    prefill = make(sources, P_TABLE, options=options(granularity))
    decode = make(targets, D_TABLE, block_tokens=12, order="BLHN", options=options(granularity))
    prefill.fill()
    prefill.open("t")
    decode.fetch("t", prefill.where, computed=False)
    prefill.compute("t")
    prefill.finish("t")
    assert endings(decode.fetched()) == {Ending.DONE}
    decode.check()
    sent = prefill.sent()
    assert endings(sent) == {Ending.DONE}
    assert {ended.transport for ended in sent} - {""} == {"rdma"}
