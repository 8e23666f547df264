"""Models as far as a benchmark needs them: the KV that they keep, and the matrices that a layer multiplies with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake_connector.kv.page import PageFormat

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Matmul:
    """`[rows, inputs] x [inputs, outputs]` in a layer, `copies` times with weights of their own (experts).

    Args:
        rows_per_token: of each copy; of an expert less than one, since few tokens come to it.
    """

    inputs: int
    outputs: int
    copies: int = 1
    rows_per_token: float = 1.0

    def rows(self, num_tokens: int) -> int:
        return max(1, math.ceil(num_tokens * self.rows_per_token))


@dataclass(frozen=True, slots=True)
class Model:
    """One rank of a model, in bfloat16.

    Args:
        kv_heads, k_dim, v_dim: what it keeps for each token and layer; v_dim 0 is MLA.
        block_tokens: vLLM's default for it.
        heads, attention_kv_heads, head_dim: of attention as prefill computes it.
        matmuls: of one layer. Norms, activations and routing are left out, so a real prefill takes longer.
    """

    name: str
    num_layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    block_tokens: int
    heads: int
    attention_kv_heads: int
    head_dim: int
    matmuls: tuple[Matmul, ...]

    @property
    def fmt(self) -> PageFormat:
        return PageFormat(self.num_layers, PAGE_TOKENS, self.kv_heads, self.k_dim, self.v_dim, 2)

    @property
    def token_nbytes(self) -> int:
        return self.fmt.nbytes // PAGE_TOKENS

    def prefill_flops(self, num_tokens: int) -> int:
        """Multiplications and additions of a prompt's matmuls, and of attention over half of its square."""
        one_layer = sum(2 * m.rows(num_tokens) * m.copies * m.inputs * m.outputs for m in self.matmuls)
        return self.num_layers * (one_layer + 2 * self.heads * num_tokens**2 * self.head_dim)


LLAMA_3_8B = Model(
    name="Llama-3-8B",
    num_layers=32,
    kv_heads=8,
    k_dim=128,
    v_dim=128,
    block_tokens=16,
    heads=32,
    attention_kv_heads=8,
    head_dim=128,
    matmuls=(Matmul(4096, 6144), Matmul(4096, 4096), Matmul(4096, 28672), Matmul(14336, 4096)),
)
QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B",
    num_layers=48,
    kv_heads=4,
    k_dim=128,
    v_dim=128,
    block_tokens=16,
    heads=32,
    attention_kv_heads=4,
    head_dim=128,
    matmuls=(
        Matmul(2048, 5120),
        Matmul(4096, 2048),
        Matmul(2048, 128),
        Matmul(2048, 1536, copies=128, rows_per_token=8 / 128),
        Matmul(768, 2048, copies=128, rows_per_token=8 / 128),
    ),
)
# 16 heads, 32 of the 256 experts, an eighth of the shared one; MLA's latent vector is whole on each rank. Attention
# takes 192 numbers of K and 128 of V a head, as much work as 160 of both. The three dense layers do as much work.
DEEPSEEK_V3 = Model(
    name="DeepSeek-V3, one of 8 ranks",
    num_layers=61,
    kv_heads=1,
    k_dim=576,
    v_dim=0,
    block_tokens=64,
    heads=16,
    attention_kv_heads=16,
    head_dim=160,
    matmuls=(
        Matmul(7168, 2112),
        Matmul(1536, 3072),
        Matmul(512, 4096),
        Matmul(2048, 7168),
        Matmul(7168, 256),
        Matmul(7168, 512),
        Matmul(256, 7168),
        Matmul(7168, 4096, copies=32, rows_per_token=8 / 256),
        Matmul(2048, 7168, copies=32, rows_per_token=8 / 256),
    ),
)
MODELS = (LLAMA_3_8B, QWEN3_30B_A3B, DEEPSEEK_V3)
