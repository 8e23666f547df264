"""States of each kind that vLLM has, in the shapes that it computes for them, in both orders of a convolution's.

Small ones: with a block of the pretended model there is room for 256 bytes. What is in a state nobody here looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import Start
from mixes import full
from test_states import GENEROUS, PROMPT, restarted, states
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from mooncake_connector.kv.geometry import Shard
from vllm_plugin.geometry import Unsupported
from vllm_plugin.states import StateBlocks, StateGroup, state_tensors

F16, F32 = torch.float16, torch.float32
Kind = tuple[str, Callable[[], Sequence[Sequence[int]]], tuple[torch.dtype, ...]]
SHAPES = MambaStateShapeCalculator
KINDS: dict[str, Kind] = {
    "Mamba": ("MAMBA1", lambda: SHAPES.mamba1_state_shape(1, 4, 4, 3), (F16, F16)),
    "Mamba2": ("MAMBA2", lambda: SHAPES.mamba2_state_shape(1, 4, 1, 2, 2, 2, 4), (F16, F32)),
    "GDN": ("GDN_ATTN", lambda: SHAPES.gated_delta_net_state_shape(1, 1, 2, 2, 2, 4), (F16, F32)),
    "KDA": ("GDN_ATTN", lambda: SHAPES.kda_state_shape(1, 2, 2), (F16, F32)),
    "short convolution": ("SHORT_CONV", lambda: SHAPES.short_conv_state_shape(1, 8, 3), (F16,)),
    "linear attention": ("LINEAR", lambda: SHAPES.linear_attention_state_shape(2, 1, 2), (F32,)),
}
LAYOUTS = ("SD", "DS")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def lay_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have vLLM keep convolutions in this order; it reads the variable once a process."""

    def set_layout(layout: str) -> None:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        get_conv_state_layout.cache_clear()

    yield set_layout
    monkeypatch.undo()
    get_conv_state_layout.cache_clear()


def mix(kind: str) -> list[KVCacheSpec]:
    name, shapes, dtypes = KINDS[kind]
    state = MambaSpec(
        block_size=16,
        shapes=tuple(tuple(shape) for shape in shapes()),
        dtypes=dtypes,
        page_size_padded=full().page_size_bytes,
        mamba_type=MambaAttentionBackendEnum[name],
        mamba_cache_mode="align",
    )
    return [full(), state]


@pytest.mark.parametrize("layout", LAYOUTS)
@every_kind
def test_a_state_of_any_kind_is_stored_and_gone_on_from(
    start: Start, lay_out: Callable[[str], None], kind: str, layout: str
) -> None:
    lay_out(layout)
    settings: dict[str, Any] = {"kv_spec": mix(kind), **GENEROUS}
    engine = start(**settings)
    engine.check(PROMPT, 3)
    assert states(engine, PROMPT) == [96]
    engine = restarted(start, engine, **settings)
    engine.check(PROMPT, 20, computed=4 + 19)


@every_kind
def test_a_state_in_the_other_order_is_a_miss(start: Start, lay_out: Callable[[str], None], kind: str) -> None:
    """NIXL asks for one of the two (vllm#54387); here each has its states, and pages of full attention are shared."""
    lay_out("SD")
    engine = start(kv_spec=mix(kind), **GENEROUS)
    engine.check(PROMPT, 3)
    lay_out("DS")
    engine = restarted(start, engine, kv_spec=mix(kind), **GENEROUS)
    same = kind == "linear attention"  # which has no convolution
    assert all(engine.pages(PROMPT)) and (states(engine, PROMPT) == [96]) == same
    engine.check(PROMPT, 3, computed=(4 if same else 100) + 2)
    assert states(engine, PROMPT) == [96]


def group(k_dim: int) -> StateGroup:
    return StateGroup(
        kind="state", num_layers=2, num_kv_heads=1, k_dim=k_dim, v_dim=0, itemsize=1, kv_dtype="state", is_mla=False,
        block_tokens=16, layer_names=("first", "second"), tp_size=1, pp_size=1,
    )  # fmt: skip


def parts(seed: int) -> list[torch.Tensor]:
    """Of one layer, as vLLM's own layers see it: a convolution in float16, and a matrix in float32."""
    source = torch.Generator().manual_seed(seed)
    return [torch.rand(5, 3, 8, generator=source).to(F16), torch.rand(5, 2, 2, 2, generator=source)]


def test_a_state_in_a_tensor_for_each_of_its_parts_is_one_object() -> None:
    layers = {"first": parts(1), "second": parts(2)}
    size = 3 * 8 * 2 + 2 * 2 * 2 * 4
    blocks = StateBlocks(state_tensors(layers, group(size), 5), Shard(0, 2, 0, 1), size, 16)
    page = torch.zeros(2 * size, dtype=torch.uint8).numpy()
    blocks.save_page([4, 3], 16, page)
    wanted = b"".join(part[3].numpy().tobytes() for name in ("first", "second") for part in layers[name])
    assert page.tobytes() == wanted
    blocks.load_page(Shard(0, 2, 0, 1), [4, 0], 16, page, 0)
    assert all(torch.equal(part[0], part[3]) for layer in layers.values() for part in layer)
    assert not torch.equal(layers["first"][0][4], layers["first"][0][3])


@pytest.mark.parametrize(
    ("spoil", "k_dim"),
    [
        (lambda layer: layer, 96),
        (lambda layer: [layer[0].transpose(1, 2), layer[1]], 80),
        (lambda layer: layer[:1], 80),
        (lambda layer: [part[:4] for part in layer], 80),
    ],
    ids=["another size", "a part in another order", "a part is missing", "fewer blocks"],
)
def test_states_that_lie_otherwise_than_announced_are_refused(spoil: Callable[[Any], Any], k_dim: int) -> None:
    layers = {name: spoil(parts(1)) for name in ("first", "second")}
    with pytest.raises(Unsupported, match=f"expected 5 blocks of {k_dim} bytes"):
        state_tensors(layers, group(k_dim), 5)


def test_a_layer_without_a_state_is_refused() -> None:
    with pytest.raises(Unsupported, match="no state for layer second"):
        state_tensors({"first": parts(1)}, group(80), 5)
