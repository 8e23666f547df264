"""Settings of an engine that make other KV of the same tokens and media: none of them meets another's pages."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from settings import Setup, kv_cache_config, vllm_config
from vllm.config import AttentionConfig, LoadConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mooncake_connector.config.schema import Config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.checkpoint import checkpoint_path
from vllm_plugin.identity import _overrides, instance_namespace
from vllm_plugin.kv_groups import read_geometry

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [8.0]}


@pytest.fixture
def config(base_config: Any, pool: Path) -> Any:
    """An engine's configuration, whose model may be changed."""
    config = vllm_config(Setup(), base_config, pool)
    config.model_config = copy.deepcopy(config.model_config)
    return config


def digest(config: Any, **changes: Any) -> bytes:
    """Of the namespace of an instance whose model has these settings."""
    config.model_config = copy.deepcopy(config.model_config)
    for name, value in changes.items():
        setattr(config.model_config, name, value)
    geometry = read_geometry(config, kv_cache_config(Setup()))
    return instance_namespace(config, geometry, Config(model_id="test")).digest


MEDIA: list[dict[str, Any]] = [
    {"mm_processor_kwargs": {"max_pixels": 1 << 16}},
    {"mm_processor_kwargs": {"max_pixels": 1 << 17}},
    {"media_io_kwargs": {"video": {"num_frames": 8}}},
    {"video_pruning_rate": 0.5},
    {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    {"mm_encoder_attn_dtype": "fp8"},
]

OTHERS: list[dict[str, Any]] = [
    {"quantization_config": QuantizationConfigArgs(linear="fp8_per_tensor")},
    {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
    {"code_revision": "other", "trust_remote_code": True},
    {"config_format": "of a plugin"},
]
VARIABLES = {
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
}


def test_instances_that_process_media_in_other_ways_do_not_share(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's hashes of images, videos and sound have what a request says of these, not what the instance was told."""
    monkeypatch.delenv("VLLM_VIDEO_LOADER_BACKEND", raising=False)
    plain = digest(config)
    assert digest(config, multimodal_config=MultiModalConfig(mm_processor_cache_gb=1)) == plain
    digests = [digest(config, multimodal_config=MultiModalConfig(**media)) for media in MEDIA]
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    digests.append(digest(config))
    assert len({plain, *digests}) == 1 + len(MEDIA) + 1


def test_layers_that_are_quantised_while_loading_are_told_apart(config: Any) -> None:
    """`--quantization online`, of which `--quantization-config` says what it is."""
    some = [QuantizationConfigArgs(linear=name) for name in ("fp8_per_tensor", "fp8_per_block")]
    some.append(QuantizationConfigArgs(linear="fp8_per_tensor", ignore=["*.0.*"]))
    digests = {digest(config, quantization="online", quantization_config=one) for one in some}
    assert len(digests) == len(some)


def test_a_configuration_from_elsewhere_is_part_of_the_name(config: Any, tmp_path: Path) -> None:
    plain = digest(config)
    elsewhere = digest(config, hf_config_path=str(tmp_path))
    config.model_config.hf_config.rope_theta = 5.0
    assert len({plain, elsewhere, digest(config, hf_config_path=str(tmp_path))}) == 3


def test_overrides_by_a_function_have_the_name_of_what_they_make(config: Any) -> None:
    """`LLM(hf_overrides=...)`: the text of a function has its address, so nothing would be found after a restart."""
    one, again = (digest(config, hf_overrides=lambda made, number=number: made) for number in range(2))
    assert one == again
    config.model_config.hf_config.rope_theta = 5.0
    assert digest(config, hf_overrides=lambda made: made) != one


def test_rope_that_was_made_for_a_longer_context_than_is_served_is_another_one(config: Any) -> None:
    """`--max-model-len auto`: vLLM makes the model for the longest context, and serves what there is memory for."""
    config.model_config.hf_text_config.rope_parameters = LONGROPE
    assert digest(config, original_max_model_len=-1) != digest(config, original_max_model_len=2048)


def test_batch_invariant_instances_are_told_apart(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the same bits whatever else is computed does not want those of an instance that did not."""
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    geometry = read_geometry(config, kv_cache_config(Setup()))
    digests = [_overrides(config, geometry, None)]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for backend in (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN):
        config.attention_config = AttentionConfig(backend=backend)
        digests.append(_overrides(config, geometry, None))
    config.attention_config = AttentionConfig(backend_per_kind={"full_attention": AttentionBackendEnum.FLASH_ATTN})
    digests.append(_overrides(config, geometry, None))
    config.parallel_config = copy.deepcopy(config.parallel_config)
    for of_a_group in ({"enable_expert_parallel": True}, {"data_parallel_size": 2}, {"tensor_parallel_size": 2}):
        for name, value in of_a_group.items():
            setattr(config.parallel_config, name, value)
        digests.append(_overrides(config, geometry, None))
    assert len(set(digests)) == 8


def test_what_is_quantised_or_computed_by_other_code_is_told_apart(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [digest(config), *(digest(copy.copy(config), **changes) for changes in OTHERS)]
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
        digests.append(digest(copy.copy(config)))
        monkeypatch.delenv(name)
    assert len(set(digests)) == len(digests)


def test_what_has_no_effect_parts_nobody(config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One setting of many that an instance of a pair may have by habit; and one text, given as such or as a file."""
    plain = digest(config)
    assert digest(copy.copy(config), code_revision="other", trust_remote_code=False) == plain
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "NONE")
    assert digest(copy.copy(config)) == plain
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_dtype_skip_layers = ["0"]
    assert digest(config) == plain
    text, found = '{"dtype": "int8"}', set()
    (tmp_path / "quantise.json").write_text(text)
    for given in (text, str(tmp_path / "quantise.json")):
        monkeypatch.setenv("VLLM_HUMMING_INPUT_QUANT_CONFIG", given)
        found.add(digest(copy.copy(config)))
    assert len(found) == 1 and plain not in found


def test_a_repository_of_which_vllm_downloaded_what_it_reads_is_the_model(tmp_path: Path) -> None:
    """The hub's library knows of more files (pytorch_model.bin), and calls the snapshot incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
    from huggingface_hub.errors import IncompleteSnapshotError

    commit, storage = "a" * 40, tmp_path / "models--owner--name"
    snapshot = storage / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    entries = {name: TreeCacheEntry(blob_id=name, size=2) for name in ("config.json", "pytorch_model.bin")}
    write_tree_cache(str(storage), commit, entries)
    with pytest.raises(IncompleteSnapshotError):
        snapshot_download("owner/name", cache_dir=tmp_path, local_files_only=True)
    assert checkpoint_path("owner/name", None, str(tmp_path)) == snapshot


def test_the_scales_of_an_encoder_are_told_apart_by_what_is_in_their_file(config: Any, tmp_path: Path) -> None:
    digests = []
    for folder, content in (("a", "1"), ("b", "1"), ("b", "2")):
        (tmp_path / folder).mkdir(exist_ok=True)
        file = tmp_path / folder / "scales.json"
        file.write_text(content)
        multimodal = MultiModalConfig(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
        digests.append(digest(config, multimodal_config=multimodal))
    dynamic = digest(config, multimodal_config=MultiModalConfig(mm_encoder_attn_dtype="fp8"))
    assert digests[0] == digests[1] and len({dynamic, *digests}) == 3


def test_kv_of_another_type_than_the_model_computes_in_says_so(config: Any) -> None:
    """`--kv-cache-dtype bfloat16` of a model in float16, and the layers that are left out of `fp8`."""
    cache = kv_cache_config(Setup())

    def named(dtype: torch.dtype, **of_cache: Any) -> bytes:
        config.cache_config = copy.copy(config.cache_config)
        for name, value in of_cache.items():
            setattr(config.cache_config, name, value)
        config.model_config.dtype = dtype
        return instance_namespace(config, read_geometry(config, cache), Config(model_id="test")).digest

    cache.kv_cache_groups[0].kv_cache_spec = replace(cache.kv_cache_groups[0].kv_cache_spec, dtype=torch.bfloat16)
    digests = [named(torch.bfloat16), named(torch.float16)]
    cache.kv_cache_groups[0].kv_cache_spec = replace(cache.kv_cache_groups[0].kv_cache_spec, dtype=torch.uint8)
    for skipped in ([], ["sliding_window"], ["0"]):
        digests.append(named(torch.float16, cache_dtype="fp8", kv_cache_dtype_skip_layers=skipped))
    assert len(set(digests)) == 5


def test_weights_from_other_repositories_are_part_of_the_name(config: Any, tmp_path: Path) -> None:
    """Ultravox's own files have neither the language model nor the tower, whose revision nobody pins."""
    for name in ("own", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    config.model_config.model = str(tmp_path / "own")
    config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    config.model_config.hf_config.text_model_id = str(tmp_path / "text")
    geometry = read_geometry(config, kv_cache_config(Setup()))
    before = instance_namespace(config, geometry, Config()).digest
    (tmp_path / "text" / "model.safetensors").write_bytes(b"others!")
    assert instance_namespace(config, geometry, Config()).digest != before


@pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress", "npcache", "of a plugin", "tensorizer"])
def test_weights_from_elsewhere_have_not_the_name_of_the_files(config: Any, tmp_path: Path, load_format: str) -> None:
    """A weight cache compares headers alone, so it has old weights when a checkpoint was overwritten in place."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    config.model_config.model = str(tmp_path)
    geometry = read_geometry(config, kv_cache_config(Setup()))
    assert instance_namespace(config, geometry, Config()).model_digest
    config.load_config = copy.deepcopy(config.load_config)
    config.load_config.load_format = load_format
    with pytest.raises(ModelIdentityError, match="set `model_id`"):
        instance_namespace(config, geometry, Config())
    assert instance_namespace(config, geometry, Config(model_id="mine")).model_digest == "mine"


def test_a_draft_whose_weights_come_from_elsewhere_has_not_the_name_of_its_files(config: Any, tmp_path: Path) -> None:
    """Its layers are part of a page. A weight cache serves drafts as well as models."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    draft = SimpleNamespace(model=str(tmp_path), revision=None)
    config.speculative_config = SimpleNamespace(
        method="eagle3", uses_draft_kv_cache=lambda: True, draft_model_config=draft, draft_load_config=None
    )
    geometry = read_geometry(config, kv_cache_config(Setup()))
    of_files = _overrides(config, geometry, None)
    assert of_files == _overrides(config, geometry, "mine"), "the model's name says nothing of the draft's files"
    config.speculative_config.draft_load_config = LoadConfig(load_format="ipc_cache")
    with pytest.raises(ModelIdentityError, match="set `model_id`"):
        _overrides(config, geometry, None)
    assert len({of_files, _overrides(config, geometry, "mine"), _overrides(config, geometry, "other")}) == 3
