"""All ranks of a server, and none of another one, have the same name for weights that changed in memory."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed
from instances import storage_config

from sglang_backend import weights
from sglang_backend.weights import MemoryWeights
from sglang_backend.writers import is_first_of_its_host
from store_client.testing import namespace

RANK = """
import sys, torch.distributed
from sglang_backend.weights import MemoryWeights
from store_client.testing import namespace
address, rank = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=int(rank), world_size=2)
mine = MemoryWeights()
assert mine.of(namespace()) == namespace()
for step in (mine.changed, mine.caches_emptied, mine.changed, mine.changed, mine.caches_emptied):
    step()
    print(mine.of(namespace()).model_digest)
torch.distributed.barrier()
"""


def _names_of_a_server() -> list[list[str]]:
    """What its two ranks, in processes of their own, called their weights after each change and each flush."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, address, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    names = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return names


def test_ranks_agree_after_each_change_and_no_other_server_has_one_of_these_names():
    (one, two), (other, _) = _names_of_a_server(), _names_of_a_server()
    assert one == two and len(set(one)) == 5
    assert not set(one) & set(other)


def _changed(monkeypatch: pytest.MonkeyPatch, store: object) -> MemoryWeights:
    monkeypatch.setattr(weights, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    changed = MemoryWeights()
    changed.changed()
    return changed


def test_where_ranks_have_no_store_in_common_each_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    names = set()
    for _ in range(2):
        mine = MemoryWeights()
        mine.changed()
        names.add(mine.of(namespace()).model_digest)
    assert len(names) == 2


def test_a_store_that_fails_or_does_not_answer_holds_up_nobody(monkeypatch):
    goes_on = threading.Event()

    class Silent:
        def compare_set(self, *args):
            goes_on.wait(100)

    class Broken:
        def compare_set(self, *args):
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(weights, "_ASK_S", 0.05)
    stores = (Silent(), Broken(), torch.distributed.HashStore(), torch.distributed.HashStore())
    names = [_changed(monkeypatch, store).of(namespace()) for store in stores]
    goes_on.set()
    assert len({name.model_digest for name in names}) == 4 and all(name.is_private for name in names)


@pytest.mark.parametrize(
    ("tp", "hosts", "dcp", "writers"),
    [
        (1, 1, 1, [0]),
        (8, 1, 1, [0]),
        (16, 2, 1, [0, 8]),
        (16, 4, 1, [0, 4, 8, 12]),
        (16, 2, 2, [0, 1, 8, 9]),
        (8, 1, 2, [0, 1]),
    ],
)
def test_one_rank_of_each_host_stores_what_all_hold(tp, hosts, dcp, writers):
    args = SimpleNamespace(tp_size=tp, pp_size=1, nnodes=hosts)
    ranks = [storage_config(tp=(rank, tp), dcp=(rank % dcp, dcp), is_mla=True) for rank in range(tp)]
    assert [rank for rank, config in enumerate(ranks) if is_first_of_its_host(config, args)] == writers


def test_where_each_pipeline_stage_or_attention_group_has_a_host_of_its_own_its_first_rank_stores():
    stages = SimpleNamespace(tp_size=8, pp_size=2, nnodes=2)
    groups = SimpleNamespace(tp_size=16, pp_size=1, nnodes=2)  # with DP attention, in groups of 8
    for args in (stages, groups):
        ranks = [storage_config(tp=(rank, 8), is_mla=True) for rank in range(8)]
        assert [is_first_of_its_host(config, args) for config in ranks] == [True] + [False] * 7
