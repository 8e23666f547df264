"""Which settings of a server give its pages another name: what the files and the shape of the memory do not say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import instances
import pytest
from host_pools import mha
from instances import server, storage_config
from sglang.srt.lora.lora_registry import LoRARef

from models import checkpoint
from mooncake_connector.config.schema import Config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity import checkpoint as checkpoint_module
from mooncake_connector.kv.namespace import Namespace
from sglang_backend import identity, plugin
from sglang_backend.host_pages import plain_format
from sglang_backend.identity import identify
from sglang_backend.weights import MemoryWeights


def name_of(config: Config = Config(), **arguments: Any) -> Namespace:  # noqa: B008 - it is never changed
    pool = mha("page_first", layers=(0, 8), dim=64, page_tokens=64, pages=8)
    with server("qwen3", **arguments):
        return identify(config, storage_config(), pool, plain_format(pool)).namespace()


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that this process has loaded, as SGLang's own loader says."""
    (tmp_path / "first").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "first")
    folder = tmp_path / "latest" / "checkpoint"
    shutil.copytree(checkpoint("qwen3"), folder)
    monkeypatch.setattr(instances, "checkpoint", lambda name: folder)
    monkeypatch.setattr(identity, "loaded_files", identity.LoadedFiles())
    says("load_model")
    return folder


def says(what: str, *, is_draft: bool = False, **arguments: Any) -> None:
    """What SGLang has done, to our hook behind it."""
    (target,) = (target for target in plugin.TARGETS if target.path.endswith(f"ModelRunner.{what}"))
    with server("qwen3", **arguments):
        target.hook(None, SimpleNamespace(is_draft_worker=is_draft))


def overwritten(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")


def other_folder(folder: Path) -> None:
    """It may be older than the server."""
    before = {file.name: file.stat() for file in folder.iterdir()}
    folder.rename(folder.with_name("before"))
    shutil.copytree(folder.with_name("before"), folder)
    os.utime(folder / "model.safetensors", ns=(0, before["model.safetensors"].st_mtime_ns - 1))


def turned_link(folder: Path) -> None:
    """To files of equal sizes and times, as those of archives are, and what a program wrote that sets the times."""
    latest, second = folder.parent, folder.parent.with_name("second")
    shutil.copytree(latest, second)
    before = (folder / "model.safetensors").stat()
    overwritten(second / "checkpoint")
    os.utime(second / "checkpoint" / "model.safetensors", ns=(0, before.st_mtime_ns))
    latest.unlink()
    latest.symlink_to(second)


def other_configuration(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")


@pytest.mark.parametrize("change", [overwritten, other_folder, turned_link, other_configuration])
def test_files_that_were_changed_after_they_were_loaded_name_no_pages(loaded: Path, change: Any) -> None:
    """SGLang attaches a backend at any time (/hicache/storage-backend), when a checkpoint may have been overwritten."""
    assert name_of().model_digest
    change(loaded)
    with pytest.raises(ModelIdentityError, match=r"are not those any more that this server loaded.*start it again"):
        name_of()
    assert name_of(Config(model_id="m")).model_digest == "m"


def test_after_an_update_it_does_not_matter_what_the_files_are(
    loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where training writes a checkpoint over the former one, from which the weights are updated."""
    updated = MemoryWeights()
    monkeypatch.setattr(identity, "in_memory", updated)
    overwritten(loaded)
    with pytest.raises(ModelIdentityError):
        name_of()
    updated.changed()
    assert updated.of(name_of()).is_private


def test_a_draft_and_adapters_are_the_files_that_were_there_when_they_were_loaded(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download of theirs that was interrupted once goes on when SGLang loads them, behind the model."""
    monkeypatch.setattr(identity, "loaded_files", identity.LoadedFiles())
    draft, adapter = tmp_path / "draft", tmp_path / "adapter"
    shutil.copytree(loaded, draft)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    settings = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(draft),
        "lora_paths": [LoRARef(lora_id="1" * 32, lora_name="adapter", lora_path=str(adapter))],
    }
    says("load_model", **settings)
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    says("init_lora_manager", **settings)
    shutil.copy(draft / "model.safetensors", draft / "model-2.safetensors")
    says("load_model", is_draft=True, **settings)
    before = name_of(**settings).digest
    for later in (draft / "model-2.safetensors", adapter / "adapter_model.safetensors"):
        content = later.read_bytes()
        later.write_bytes(b"others")
        with pytest.raises(ModelIdentityError, match=f"the files of {later.parent} are not those"):
            name_of(**settings)
        later.write_bytes(content)
        monkeypatch.setattr(identity, "loaded_files", identity.LoadedFiles())
        for what, is_draft in (("load_model", False), ("init_lora_manager", False), ("load_model", True)):
            says(what, is_draft=is_draft, **settings)
        assert name_of(**settings).digest == before


@pytest.mark.parametrize("layer", [0, 1])
def test_scales_and_experts_are_the_files_that_were_there_when_the_model_was_loaded(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    monkeypatch.setattr(identity, "loaded_files", identity.LoadedFiles())
    scales, folder = tmp_path / "scales.json", experts(loaded / "experts", b"a", b"b")
    scales.write_text("{}")
    settings = {"quantization_param_path": str(scales), "kt_weight_path": folder}
    says("load_model", **settings)
    before = name_of(**settings).digest
    of_layer = loaded / "experts" / f"layer_{layer}" / "gate_0.kt"
    for file, what in ((scales, str(scales)), (of_layer, rf"{folder} \(experts\)")):
        content, time_ns = file.read_bytes(), file.stat().st_mtime_ns
        file.write_bytes(b"others")
        for config in (Config(), Config(model_id="m")):
            with pytest.raises(ModelIdentityError, match=f"the files of {what} are not those"):
                name_of(config, **settings)
        file.write_bytes(content)
        os.utime(file, ns=(0, time_ns))
        assert name_of(**settings).digest == before


def test_a_draft_in_the_files_of_the_model_leaves_what_was_noted_of_it(loaded: Path) -> None:
    """Files that change between the two loads name nothing: part of what is in memory is of the former ones."""
    overwritten(loaded)
    settings = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(loaded)}
    says("load_model", is_draft=True, **settings)
    with pytest.raises(ModelIdentityError, match="are not those any more"):
        name_of(**settings)


def test_files_that_were_touched_by_a_backup_are_those_that_were_loaded(loaded: Path, tmp_path: Path) -> None:
    digest = name_of().digest
    os.link(loaded / "model.safetensors", tmp_path / "link")
    (loaded / "config.json").chmod(0o600)
    assert name_of().digest == digest


def test_deterministic_inference_takes_no_kv_that_is_equal_but_for_the_last_bits() -> None:
    settings = {"attention_backend": "triton", "enable_deterministic_inference": True}
    plain, deterministic = name_of(attention_backend="triton"), name_of(**settings)
    assert plain.engine_overrides == "", "shared with vLLM"
    assert deterministic.digest != plain.digest
    assert deterministic.digest == name_of(**settings).digest
    for other in ({"tp_size": 2}, {"decode_attention_backend": "flashinfer"}, {"rl_on_policy_target": "fsdp"}):
        assert deterministic.digest != name_of(**{**settings, **other}).digest, other


@pytest.mark.parametrize(
    "settings",
    [
        {"forward_hooks": [{"name": "steers", "target_modules": ["model.layers.3"], "hook_factory": "a:b"}]},
        {"modelopt_checkpoint_restore_path": "/scales"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_model_that_computes_with_more_than_its_files_shares_no_pages(settings: dict[str, Any]) -> None:
    named, plain = name_of(**settings), name_of()
    assert plain.engine_overrides == "" and named.digest != plain.digest
    assert named.digest == name_of(**settings).digest


def experts(folder: Path, *weights: bytes, kind: str = ".kt") -> str:
    """As KTransformers reads them: of the same names in a folder of each layer."""
    for layer, content in enumerate(weights):
        (folder / f"layer_{layer}").mkdir(parents=True)
        (folder / f"layer_{layer}" / f"gate_0{kind}").write_bytes(content)
    return str(folder)


def test_experts_of_ktransformers_are_named_by_what_their_files_hold(tmp_path: Path) -> None:
    named = name_of(kt_weight_path=experts(tmp_path / "one", b"a", b"b")).digest
    assert named != name_of().digest
    assert named == name_of(kt_weight_path=experts(tmp_path / "copy", b"a", b"b")).digest
    for other, weights in {"first": (b"c", b"b"), "last": (b"a", b"c"), "swapped": (b"b", b"a")}.items():
        assert named != name_of(kt_weight_path=experts(tmp_path / other, *weights)).digest, other
    for kind in (".safetensors", ".gguf"):
        assert name_of(kt_weight_path=experts(tmp_path / kind, b"a", b"b", kind=kind)).digest != named
    with pytest.raises(ModelIdentityError, match="no file that matches"):
        name_of(kt_weight_path=experts(tmp_path / "unknown", b"a", kind=".weights"))


@pytest.mark.parametrize(
    "setting", [{"kt_method": "LLAMAFILE"}, {"kt_num_gpu_experts": 8}, {"kt_max_deferred_experts_per_token": 2}],
    ids=lambda setting: " ".join(setting),
)  # fmt: skip
def test_how_experts_of_ktransformers_are_computed_is_part_of_the_name(tmp_path: Path, setting: dict[str, Any]) -> None:
    folder = experts(tmp_path / "experts", b"a")
    assert name_of(kt_weight_path=folder, **setting).digest != name_of(kt_weight_path=folder).digest


def test_an_adapter_for_draft_tokens_alone_changes_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNO's: what is accepted, its target has computed again without the adapter."""
    monkeypatch.setattr("sglang.srt.arg_groups.speculative_hook._handle_uno", lambda args: None)  # which wants a GPU
    names = [name_of(speculative_algorithm="UNO", uno_lora_path=path).digest for path in ("/one", "/other")]
    assert names[0] == names[1] != name_of().digest


def test_adapters_of_which_a_part_is_left_out_have_another_name(tmp_path: Path) -> None:
    """An adapter for "all-linear" is loaded as far as --lora-target-modules goes, with a warning."""
    (tmp_path / "adapter_config.json").write_text('{"target_modules": "all-linear"}')
    settings = {"lora_paths": [LoRARef(lora_id="1" * 32, lora_name="adapter", lora_path=str(tmp_path))]}
    whole, part = name_of(**settings), name_of(**settings, lora_target_modules=["q_proj", "o_proj"])
    assert whole.lora and whole.digest == name_of(**settings).digest
    assert part.digest != whole.digest
    assert part.digest == name_of(**settings, lora_target_modules=["o_proj", "q_proj"]).digest


def test_a_model_that_was_downloaded_elsewhere_is_named_and_watched_there(
    loaded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--download-dir`: weights are there, configuration is in the hub's own cache, which may have older weights."""
    plain, older = name_of().model_digest, tmp_path / "older"
    shutil.copytree(loaded, older)
    overwritten(older)
    places = {None: older, "there": loaded}
    monkeypatch.setattr(identity, "checkpoint_path", lambda name, revision, place=None: places[place])
    monkeypatch.setattr(checkpoint_module, "checkpoint_path", lambda name, revision, place=None: places[place])
    assert name_of(download_dir="there").model_digest == plain
    monkeypatch.setattr(identity, "loaded_files", identity.LoadedFiles())
    says("load_model", download_dir="there")
    overwritten(loaded)
    with pytest.raises(ModelIdentityError, match="start it again"):
        name_of(download_dir="there")


def test_weights_from_the_memory_of_another_instance_have_not_the_name_of_the_files() -> None:
    """They are those of a seed instance, which may have been updated since it read the same files."""
    seed = {
        "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1",
        "remote_instance_weight_loader_seed_instance_service_port": 1,
        "remote_instance_weight_loader_send_weights_group_ports": [2],
    }
    with pytest.raises(ModelIdentityError, match=r"another process.*'remote_instance'\).*set `model_id`"):
        name_of(load_format="remote_instance", **seed)
    with pytest.raises(ModelIdentityError, match=r"another process.*'weight_cache'\).*set `model_id`"):
        name_of(weight_cache_mode="client")
