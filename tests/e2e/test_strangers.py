"""What must not cross does not: instances and requests whose KV means something else never name the same page.

Both engines' own classes say what they would ask the pool for: a page is found by its namespace and its key alone. Each
claim that names differ stands beside one that those of equal meaning are equal, whichever engine made them.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated.waiting import wait_for
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from e2e.pages import PAGE_TOKENS
from e2e.process import ENVIRONMENTS, small_environment
from models import checkpoint
from mooncake_connector.config.sources import load_config
from mooncake_connector.kv.keys import page_keys
from vllm_plugin.identity import instance_namespace
from vllm_plugin.kv_groups import read_geometry
from vllm_plugin.naming import AdapterKeys, chain_root, named_tokens

MODEL, OTHER_MODEL = (str(checkpoint(name)) for name in ("qwen3", "qwen3-other"))
TOKENS = list(range(3 * PAGE_TOKENS))
IMAGE = ("ab" * 32, 70, 40)  # content, first token, length: it begins in the second page
OTHER_ROPE = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}

BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "other weights": ({"model": OTHER_MODEL}, {"model_path": OTHER_MODEL}),
    "float16": ({"dtype": "float16"}, {"dtype": "float16"}),
    "other page_tokens": ({"page_tokens": 128}, {"page_size": 128}),
    "other rope": ({"hf_overrides": OTHER_ROPE}, {"json_model_override_args": json.dumps(OTHER_ROPE)}),
}
"""Settings of an instance as vLLM (with our page_tokens) and as SGLang is told them."""


@pytest.fixture(scope="module")
def adapter() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_config.json").write_text("{}")
        (Path(folder) / "adapter_model.safetensors").write_bytes(b"weights")
        yield Path(folder)


@pytest.fixture(scope="module")
def sglang(adapter: Path) -> dict[str, dict[str, Any]]:
    """Namespaces and keys by SGLang's interpreter."""
    instances = {
        **{name: settings for name, (_, settings) in BOTH.items()},
        "EAGLE": {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": MODEL,
            "speculative_num_steps": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 2,
        },
        "adapters": {"lora_paths": [f"a={adapter}"], "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
        "8-bit KV": {"kv_cache_dtype": "fp8_e5m2"},
    }
    requests = {
        "plain": {},
        "salt": {"cache_salt": "a"},
        "other salt": {"cache_salt": "b"},
        "extra key": {"extra_key": "a"},
        "adapter": {"lora": ["a", str(adapter)]},
        "adapter and salt": {"lora": ["a", str(adapter)], "cache_salt": "a"},
        "image": {"image": IMAGE},
        "other image": {"image": ("cd" * 32, *IMAGE[1:])},
        "pairs": {"pairs": True, "tokens": [*TOKENS, 7]},
    }
    asked = {
        "instances": {name: {"model_path": MODEL, **settings} for name, settings in instances.items()},
        "requests": {name: {"tokens": TOKENS, **request} for name, request in requests.items()},
    }
    answer = subprocess.run(
        [str(ENVIRONMENTS / "sglang" / "bin" / "python"), str(Path(__file__).with_name("sglang_names.py"))],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=small_environment(),
        cwd=tempfile.gettempdir(),
    )
    names: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return names


def vllm_namespace(settings: dict[str, Any]) -> str:
    """Digest of the namespace of a vLLM instance of a Qwen3 checkpoint with these settings."""
    settings = {"model": MODEL, "dtype": "bfloat16", "max_model_len": 4096, **settings}
    ours = {name: settings.pop(name) for name in ("page_tokens",) if name in settings}
    config = EngineArgs(enforce_eager=True, **settings).create_engine_config()
    layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(8)]
    spec = FullAttentionSpec(block_size=128, num_kv_heads=4, head_size=64, dtype=config.model_config.dtype)
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
    return instance_namespace(config, read_geometry(config, cache), load_config(ours, {})).digest.hex()


@pytest.fixture(scope="module")
def vllm_namespaces() -> dict[str, str]:
    return {name: vllm_namespace(settings) for name, (settings, _) in BOTH.items()}


def test_instances_of_equal_meaning_have_one_namespace_in_both_engines(
    vllm_namespaces: dict[str, str], sglang: dict[str, dict[str, Any]]
) -> None:
    for name in BOTH:
        assert sglang["namespaces"][name] == vllm_namespaces[name], name


def test_instances_of_other_meaning_have_other_namespaces(sglang: dict[str, dict[str, Any]]) -> None:
    """Other weights, dtype, page_tokens or rope; and what only other SGLang instances can read at all."""
    namespaces = sglang["namespaces"]
    assert len(set(namespaces.values())) == len(namespaces) == len(BOTH) + 3


def vllm_keys(adapter: Path | None = None, cache_salt: str | None = None, image: str | None = None) -> list[str]:
    features = []
    if image is not None:
        place = PlaceholderRange(IMAGE[1], IMAGE[2])
        features = [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)]
    lora = None if adapter is None else LoRARequest("a", 1, str(adapter))
    greedy = SamplingParams(max_tokens=1)
    request = Request("r", TOKENS, greedy, None, mm_features=features, lora_request=lora, cache_salt=cache_salt)
    adapters = AdapterKeys()
    if adapter is not None:
        adapters.used(lora)  # starts to hash it
        wait_for(lambda: adapters.key(lora))
    root = chain_root(request, adapters)
    assert root is not None
    named = named_tokens(request, 0, len(TOKENS))
    return [key.hex() for key in page_keys(named, PAGE_TOKENS, root=root)]


def test_plain_and_salted_requests_have_the_same_keys_in_both_engines(sglang: dict[str, dict[str, Any]]) -> None:
    keys = sglang["keys"]
    assert keys["plain"] == vllm_keys()
    assert keys["salt"] == vllm_keys(cache_salt="a")
    assert keys["other salt"] == vllm_keys(cache_salt="b")


def test_requests_of_other_meaning_share_no_key_from_where_they_differ(
    adapter: Path, sglang: dict[str, dict[str, Any]]
) -> None:
    """Salts, extra keys, adapters and EAGLE's pairs differ from the first page on, images from their own page on."""
    theirs = sglang["keys"]
    ours = {
        "plain": vllm_keys(),
        "salt": vllm_keys(cache_salt="a"),
        "adapter": vllm_keys(adapter=adapter),
        "adapter and salt": vllm_keys(adapter=adapter, cache_salt="a"),
        "image": vllm_keys(image=IMAGE[0]),
    }
    assert theirs["image"][0] == ours["image"][0] == ours["plain"][0], "the page before the image is text"
    shared = {("plain", "plain"), ("salt", "salt")}
    for one, their_keys in theirs.items():
        for two, our_keys in ours.items():
            if (one, two) not in shared:
                assert not set(their_keys[1:]) & set(our_keys[1:]), (one, two)
                if "image" not in one + two:
                    assert not set(their_keys) & set(our_keys), (one, two)
    assert len({keys[-1] for keys in theirs.values()}) == len(theirs)
