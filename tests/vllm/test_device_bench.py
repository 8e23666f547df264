"""What `bench device` measures on a GPU, with tiny sizes on the processor, and what it says where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vllm_plugin.device.bench.models import DEEPSEEK_V3, LLAMA_3_8B, MODELS, Matmul, Model
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
