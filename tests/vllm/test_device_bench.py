"""What `bench device` measures on a GPU, with tiny sizes on the processor, and what it says where no GPU is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_stand_in import StandIn, kernels_by_numpy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

from mooncake_connector.cli.bench import device as bench
from mooncake_connector.cli.main import app
from transfer.transports.base import Unavailable
from vllm_plugin.blocks import KVBlocks
from vllm_plugin.device.bench import limits, measure, models, moves
from vllm_plugin.device.bench.cache import Cache
from vllm_plugin.device.bench.models import DEEPSEEK_V3, LLAMA_3_8B, MODELS, Matmul, Model
from vllm_plugin.device.bench.moves import Moves
from vllm_plugin.device.bench.stack import Stack

TINY = Model(
    name="tiny",
    num_layers=3,
    kv_heads=2,
    k_dim=16,
    v_dim=16,
    block_tokens=16,
    heads=4,
    attention_kv_heads=2,
    head_dim=16,
    matmuls=(Matmul(64, 96), Matmul(32, 48, copies=4, rows_per_token=2 / 4)),
)


def test_a_stack_multiplies_as_often_as_its_model() -> None:
    stack = Stack(TINY, torch.device("cpu"), 128)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # others are not counted
        stack.prefill(128)
    attention = TINY.num_layers * 4 * TINY.heads * 128**2 * TINY.head_dim  # of the whole square
    assert counted.get_total_flops() - attention // 2 == TINY.prefill_flops(128)
    with FlopCounterMode(display=False) as counted:
        stack.decode(8)()
    assert counted.get_total_flops() == replace(TINY, heads=0).prefill_flops(8)


def test_the_models_are_as_large_as_they_are_known_to_be() -> None:
    assert [model.token_nbytes for model in MODELS] == [128 << 10, 96 << 10, 61 * 576 * 2]
    parameters = sum(m.inputs * m.outputs * m.copies for m in LLAMA_3_8B.matmuls) * LLAMA_3_8B.num_layers
    assert parameters == pytest.approx(7.0e9, rel=0.01), "8.0e9 less the vocabulary's two matrices"
    whole = 8 * sum(m.inputs * m.outputs * m.copies for m in DEEPSEEK_V3.matmuls) * DEEPSEEK_V3.num_layers
    assert whole == pytest.approx(671e9, rel=0.1)


@pytest.mark.parametrize("model", [TINY, replace(TINY, kv_heads=1, k_dim=24, v_dim=0, block_tokens=64)])
def test_pages_of_a_cache_are_canonical_and_are_found_where_they_were_copied_to(model: Model) -> None:
    cache = Cache(model, torch.device("cpu"), 256)
    blocks = KVBlocks(cache.tensors, model.fmt.whole, model.fmt, None)
    assert cache.num_pages == 4 and cache.equal_nbytes() == 0
    page = np.empty(model.fmt.nbytes, dtype=np.uint8)
    for number in range(4):
        blocks.save_page(cache.source, number * 64, page)
        assert page.tobytes() == cache.page(number)
        blocks.load_page(model.fmt.whole, cache.target, number * 64, page, 0)
        assert cache.equal_nbytes() == (number + 1) * model.fmt.nbytes
    cache.forget()
    assert cache.equal_nbytes() == 0


def test_where_no_gpu_is_the_command_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise Unavailable("no CUDA driver: libcuda.so.1 is not there")

    monkeypatch.setattr(bench, "system_driver", none)
    result = CliRunner().invoke(app, ["bench", "device", "--json"])
    said = "no GPU here, so nothing was measured (no CUDA driver: libcuda.so.1 is not there): run this on"
    assert result.exit_code == 1 and said in json.loads(result.stdout)["error"] and said in result.stderr


@pytest.fixture(scope="module")
def kernel() -> Any:
    pytest.importorskip("triton")
    return kernels_by_numpy()


@pytest.fixture
def without_a_device(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor in a GPU's place: its times mean nothing."""
    device = StandIn(kernel)
    device.install(monkeypatch)
    monkeypatch.setattr(moves, "locks_for", device.locks_for)
    monkeypatch.setattr(moves, "_LOCKS_STAND_S", 0.1)
    monkeypatch.setattr(bench, "system_driver", lambda: None)
    monkeypatch.setattr(measure, "use", lambda ordinal: torch.device("cpu"))
    monkeypatch.setattr(measure, "describe", lambda device: {"gpu": "none"})
    monkeypatch.setattr(limits, "measure", lambda *args: limits.Limits(2e9, 2e9, 3e9))
    monkeypatch.setattr(limits, "milliseconds", lambda device, work, rounds: [work() or 1.0 for _ in range(rounds)])
    monkeypatch.setattr(models, "MODELS", (TINY,))
    monkeypatch.setattr(bench, "QUICK", bench.Scale(num_tokens=256, hit_tokens=(128, 256), rounds=2, num_steps=3))


def run_quick(folder: Path) -> Result:
    return CliRunner().invoke(app, ["bench", "device", "--quick", "--json", "--folder", str(folder)])


def test_a_run_measures_everything_and_leaves_nothing(without_a_device: None, tmp_path: Path) -> None:
    result = run_quick(tmp_path)
    assert result.exit_code == 0, result.stderr
    rows = {row["figure"].removeprefix("tiny: "): row for row in json.loads(result.stdout)["rows"]}
    beside = ["load", "save", "both at once", "hit of 128 tokens", "hit of 256 tokens"]
    beside += ["p99 of a decode step beside saves"]
    locked = rows.pop("page-locked memory of the pool")
    assert 0 <= locked["value"] < 1
    assert [name for name, row in rows.items() if row["limit"]] == beside
    assert all(row["value"] > 0 for row in rows.values())
    assert rows["loaded bytes that were checked"]["value"] == 2 * 256 * TINY.token_nbytes / 2**30
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_end_a_run(without_a_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "page", lambda cache, number: b"other")
    result = run_quick(tmp_path)
    assert result.exit_code == 1 and "page 0 in the pool is not what the blocks hold" in result.stderr


def test_bytes_that_were_not_loaded_are_missed(
    without_a_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moves, "load", lambda *args: None)
    result = run_quick(tmp_path)
    nbytes = 256 * TINY.token_nbytes
    assert result.exit_code == 1 and f"{nbytes} of {nbytes} bytes that were loaded are not those" in result.stderr
