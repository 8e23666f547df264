"""How far the canonical pages are apart that two engines computed for the same tokens, and each from the exact values.

The engines' kernels round differently, and every layer builds on what the one before it rounded, so bytes differ where
meaning does not. An error is the difference of two elements over the root mean square of all elements of that layer's
K (or V): the mean of it says whether both mean the same, the largest is that of the widest outlier channel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from e2e.pages import PAGE_TOKENS
from mooncake_connector.kv.keys import page_keys, root_digest
from store_client import EmbeddedStore
from store_client.testing import get_pages

__all__ = ["elements", "errors", "exact_elements", "mistakes", "table"]

Elements = npt.NDArray[np.float32]
"""[K/V, layer, token, head, dim]: the full pages of a prompt, one after the other."""


def elements(pool: Path, model: Path, prompt: Sequence[int], *, cache_salt: str) -> Elements:
    """What the pool has for `prompt`, read as the page format says: K `[layer][token][head][dim]`, then V."""
    keys = page_keys(list(prompt), PAGE_TOKENS, root=root_digest(None, cache_salt))
    with EmbeddedStore(pool) as store:
        (info,) = (info for info in store.namespaces() if Path(info.namespace.model_name) == model)
        namespace, nbytes = info.namespace, info.nbytes // info.pages
        pages = np.empty((len(keys), nbytes), np.uint8)
        assert get_pages(store.space(namespace, info.shard), keys, list(pages), nbytes=nbytes) == [True] * len(keys)
    assert namespace.kv_dtype == "bfloat16"
    halves = pages.view("<u2").astype(np.uint32) << 16
    shape = (len(keys), 2, namespace.num_layers, PAGE_TOKENS, namespace.num_kv_heads, namespace.head_dim)
    by_page = halves.view(np.float32).reshape(shape)
    return np.concatenate(list(by_page), axis=2)


def exact_elements(model: Path, prompts: Iterable[Sequence[int]]) -> list[Elements]:
    """What transformers computes in float32 from the same weights: the values that both engines round."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    computed = []
    for prompt in prompts:
        tokens = torch.tensor([prompt[: len(prompt) // PAGE_TOKENS * PAGE_TOKENS]])
        with torch.inference_mode():
            layers = network(tokens).past_key_values.layers
        halves = [torch.stack([getattr(layer, half)[0] for layer in layers]) for half in ("keys", "values")]
        computed.append(torch.stack(halves).numpy().swapaxes(2, 3))
    return computed


def errors(one: Elements, two: Elements) -> tuple[Elements, Elements]:
    """(largest, mean) error, each `[K/V, layer, page]`."""
    scale = np.sqrt((one**2).mean(axis=(2, 3, 4), keepdims=True))
    apart = np.abs(one - two) / scale
    by_page = apart.reshape(*apart.shape[:2], apart.shape[2] // PAGE_TOKENS, -1)
    return by_page.max(axis=-1), by_page.mean(axis=-1)


def _without_rope(model: Path) -> Callable[[Elements], Elements]:
    """Turns K back by its position, as if it had been stored before rope."""
    config = json.loads((model / "config.json").read_text())
    theta = float((config.get("rope_parameters") or config)["rope_theta"])

    def turn(pages: Elements) -> Elements:
        tokens, half = pages.shape[2], pages.shape[4] // 2
        angle = np.outer(np.arange(tokens), theta ** (-np.arange(half) / half))[:, None, :]
        cos, sin = np.cos(angle), np.sin(angle)
        turned = pages.copy()
        first, second = pages[0, ..., :half], pages[0, ..., half:]
        turned[0, ..., :half] = first * cos + second * sin
        turned[0, ..., half:] = second * cos - first * sin
        return turned

    return turn


def _interleaved(pages: Elements) -> Elements:
    """K in the other rope style: pairs side by side in place of halves."""
    wrong = pages.copy()
    half = pages.shape[4] // 2
    wrong[0, ..., 0::2], wrong[0, ..., 1::2] = pages[0, ..., :half], pages[0, ..., half:]
    return wrong


def _token_fastest(pages: Elements) -> Elements:
    """K packed as some CPU kernels keep it, dim by dim, and read as if it were token by token."""
    wrong = pages.copy()
    for start in range(0, pages.shape[2], PAGE_TOKENS):
        page = pages[0, :, start : start + PAGE_TOKENS]
        wrong[0, :, start : start + PAGE_TOKENS] = np.moveaxis(page, 1, -1).reshape(page.shape)
    return wrong


def mistakes(model: Path) -> dict[str, tuple[Callable[[Elements], Elements], Sequence[int]]]:
    """What a wrong writer would do to right pages, and which halves (0 is K, 1 is V) it would spoil."""
    return {
        "heads in another order": (lambda pages: pages[:, :, :, ::-1], (0, 1)),
        "K without rope": (_without_rope(model), (0,)),
        "rope of the other style": (_interleaved, (0,)),
        "packed token by token": (_token_fastest, (0,)),
        "K and V exchanged": (lambda pages: pages[::-1], (0, 1)),
        "the next token's": (lambda pages: np.roll(pages, 1, axis=2), (0, 1)),
        "the next layer's": (lambda pages: np.roll(pages, 1, axis=1), (0, 1)),
    }


def table(vllm: Elements, sglang: Elements, exact: Elements) -> str:
    """Errors by layer, in Markdown: of the engines against each other, and of each against the exact values."""
    rows = ["| layer | K: mean | largest | vLLM | SGLang | V: mean | largest | vLLM | SGLang |", "|---" * 9 + "|"]
    largest, mean = errors(vllm, sglang)
    figures = [mean.mean(axis=2), largest.max(axis=2), *(errors(exact, of)[1].mean(axis=2) for of in (vllm, sglang))]
    for layer in range(mean.shape[1]):
        columns = " | ".join(f"{100 * figure[half, layer]:.2g} %" for half in (0, 1) for figure in figures)
        rows.append(f"| {layer} | {columns} |")
    return "\n".join(rows) + "\n"
