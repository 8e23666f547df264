"""What a prompt takes in the pool where a model's layers do not all keep every token.

    python tests/bench/hybrid_bytes.py          # the tables of docs/benchmarks.md, in Markdown

Arithmetic over published configurations; nothing is measured. Stored are all full pages of layers with full attention
(and of an indexer), of windows what a hit at the prompt's end and one of the prompt itself go on from, and the state of
the latter where `state_budget` allows one so early. Hits end at multiples of what pages and blocks have in common.
"Everything" is what a connector stores that takes every layer for one of full attention, and every state that vLLM
keeps at a block boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod

BFLOAT16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Layers:
    """Layers of one kind.

    Args:
        token_nbytes: of one layer and one token; 0 for states.
        window: tokens that a token attends to; None for all.
        state_nbytes: of one layer at one boundary.
    """

    count: int
    token_nbytes: int = 0
    window: int | None = None
    state_nbytes: int = 0


@dataclass(frozen=True)
class Model:
    """A model as vLLM lays it out: tokens in a block of every kind of layer, the layers, and tokens in a page."""

    name: str
    block_tokens: int
    layers: tuple[Layers, ...]
    page_tokens: int = 64

    @property
    def unit_tokens(self) -> int:
        """Hits end at multiples of it."""
        return lcm(self.page_tokens, self.block_tokens)

    def spacing_tokens(self, state_budget: float) -> int:
        """A state is stored that lies at least so far behind the last one, or the prompt's beginning."""
        token_nbytes = sum(kind.count * kind.token_nbytes for kind in self.layers if kind.window is None)
        state_nbytes = sum(kind.count * kind.state_nbytes for kind in self.layers)
        return int(state_nbytes / (state_budget * max(token_nbytes, 1)))

    def stored(self, num_tokens: int, state_budget: float = 4.0) -> int:
        """Bytes of a prompt's pages and states in the pool."""
        unit, pages = self.unit_tokens, num_tokens // self.page_tokens * self.page_tokens
        hit, end = (num_tokens - 1) // unit * unit, num_tokens // unit * unit  # its last token is computed in any case
        states = int(hit > 0 and hit >= self.spacing_tokens(state_budget))
        total = 0
        for kind in self.layers:
            window = 0 if kind.window is None else _whole(kind.window - 1, unit)
            kept = pages if kind.window is None else end - max(0, hit - window)
            total += kind.count * (kind.token_nbytes * kept + kind.state_nbytes * states)
        return total

    def everything(self, num_tokens: int) -> int:
        pages, boundaries = num_tokens // self.page_tokens * self.page_tokens, num_tokens // self.block_tokens
        return sum(kind.count * (kind.token_nbytes * pages + kind.state_nbytes * boundaries) for kind in self.layers)


def _whole(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens) * block_tokens


def attention(count: int, heads: int, head_dim: int, window: int | None = None, itemsize: int = BFLOAT16) -> Layers:
    return Layers(count, 2 * heads * head_dim * itemsize, window)


def delta_rule(count: int, key_heads: int, value_heads: int, dim: int, state_itemsize: int) -> Layers:
    """Gated delta rule (GDN): the last 3 inputs of a convolution in bfloat16, and a matrix for each value head."""
    channels = (2 * key_heads + value_heads) * dim
    return Layers(count, state_nbytes=3 * channels * BFLOAT16 + prod((value_heads, dim, dim)) * state_itemsize)


TINY = (
    Model("gemma3", 128, (attention(4, 4, 64, 128), attention(2, 4, 64))),
    Model("gpt-oss", 128, (attention(2, 4, 64, 128), attention(2, 4, 64))),
    Model("qwen3-next", 256, (delta_rule(3, 4, 8, 64, FLOAT32), attention(1, 4, 64))),
    Model("cohere2", 128, (attention(3, 4, 64, 128), attention(1, 4, 64))),
)
"""Those of tests/models, in bfloat16, with the blocks that vLLM's CPU build gives them."""

PUBLISHED = (
    Model("gpt-oss-120b", 16, (attention(18, 8, 64, 128), attention(18, 8, 64))),
    Model("Qwen3-Next-80B", 544, (delta_rule(36, 16, 32, 128, BFLOAT16), attention(12, 2, 256)), page_tokens=34),
    Model("Gemma 3 27B", 16, (attention(52, 16, 128, 1024), attention(10, 16, 128))),
    Model("DeepSeek V3.2", 64, (Layers(61, (512 + 64) * BFLOAT16), Layers(61, 128 + 4))),  # latent and rope; indexer
)
"""Layers, heads and windows of their config.json; bfloat16, DeepSeek's indexer in fp8 with a scale for each token."""

PROMPTS = (1_000, 8_000, 64_000)


def table(models: tuple[Model, ...]) -> str:
    head = [f"{tokens:,} tokens | of everything" for tokens in PROMPTS]
    rows = [f"| model | {' | '.join(head)} |", "|---" * (1 + 2 * len(PROMPTS)) + "|"]
    for model in models:
        cells = []
        for tokens in PROMPTS:
            stored, everything = model.stored(tokens), model.everything(tokens)
            cells.append(f"{stored / tokens * 1000 / 2**20:.3g} MiB | {stored / everything:.0%}")
        rows.append(f"| {model.name} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(TINY), table(PUBLISHED), sep="\n\n")
