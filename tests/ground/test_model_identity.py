"""A model is what its files hold: not where they lie, what they are called, or what the server calls it."""

import json
import logging
import os
import shutil
import struct
import sys
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from causes import forget_causes

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity import fingerprint
from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.identity.fingerprint import default_cache_dir, fingerprint_files
from mooncake_connector.kv.identity.model import files_digest, model_digest

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "rope_theta": 10000.0}


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Files of a test are younger than those that are remembered outside; a test of that sets its own value."""
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    forget_causes()


@pytest.fixture
def reads(monkeypatch):
    """The files whose content was read, in order."""
    seen = []
    original = fingerprint._fingerprint
    monkeypatch.setattr(fingerprint, "_fingerprint", lambda file, pool: seen.append(file.name) or original(file, pool))
    return seen


def checkpoint(path: Path, *, seed: int = 0, shards: int = 2, **config: object) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for shard in range(shards):
        content = struct.pack("<II", seed, shard) + bytes(range(256)) * 40
        (path / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors").write_bytes(content)
    return path


def weights(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def flip_byte(file: Path, offset: int) -> None:
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def in_another_folder(one, other):
    shutil.rmtree(other)
    shutil.copytree(one, other)


def behind_links_as_in_a_hub_cache(one, other):
    for file in one.iterdir():
        (other / file.name).unlink()
        (other / file.name).symlink_to(file)


def shards_renamed(one, other):
    first, second = weights(other)
    first.rename(other / "z.safetensors")
    second.rename(other / "a.safetensors")


def another_order_of_keys(one, other):
    (other / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))


def files_that_no_engine_loads(one, other):
    for name in ("README.md", "tokenizer.json", "generation_config.json", "pytorch_model.bin"):
        (other / name).write_text("{}")


class TestSameModel:
    @pytest.mark.parametrize(
        "change",
        [in_another_folder, behind_links_as_in_a_hub_cache, shards_renamed, another_order_of_keys,
         files_that_no_engine_loads],
    )  # fmt: skip
    def test_after_a_change_that_changes_no_result(self, tmp_path, change):
        one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "deeper" / "other")
        change(one, other)
        assert model_digest(one) == model_digest(other)

    @pytest.mark.parametrize("field", ["_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"])
    def test_with_another_value_of_a_volatile_field(self, tmp_path, field):
        one = checkpoint(tmp_path / "one", **{field: "a"}, text_config={"hidden_size": 8, field: "float16"})
        other = checkpoint(tmp_path / "other", **{field: "b"}, text_config={"hidden_size": 8})
        assert model_digest(one) == model_digest(other)

    def test_of_every_release(self, tmp_path):
        """Existing pools keep their pages."""
        expected = "dd5f4957d0dead5d5b61e8ae3e581660b754c957c11c5edea67dba8413fb40c2"
        assert model_digest(checkpoint(tmp_path / "one")) == expected


def swap_slices(path):
    content = weights(path)[0].read_bytes()
    weights(path)[0].write_bytes(content[1000:2000] + content[:1000] + content[2000:])


CHANGES = {
    "a byte beyond the first slice": lambda path: flip_byte(weights(path)[0], 7777),
    "two slices that change places": swap_slices,
    "a missing shard": lambda path: weights(path)[0].unlink(),
    "a shard that is there twice": lambda path: shutil.copy(weights(path)[0], path / "again.safetensors"),
    "another architecture": lambda path: (path / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5e5})),
    "hf_quant_config.json": lambda path: (path / "hf_quant_config.json").write_text("{}"),
    "quantize_config.json": lambda path: (path / "quantize_config.json").write_text("{}"),
    "modeling_custom.py": lambda path: (path / "modeling_custom.py").write_text("{}"),
    "params.json": lambda path: (path / "params.json").write_text("{}"),
    "preprocessor_config.json": lambda path: (path / "preprocessor_config.json").write_text("{}"),
    "video_preprocessor_config.json": lambda path: (path / "video_preprocessor_config.json").write_text("{}"),
}


class TestAnotherModel:
    @pytest.mark.parametrize("offset", [0, 5000, -1], ids=["first byte", "middle", "last byte"])
    @pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
    def test_when_one_byte_of_the_weights_under_one_path_changes(self, tmp_path, offset, cached):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache" if cached else None
        before = model_digest(path, cache_dir=cache)
        flip_byte(weights(path)[1], offset)
        assert model_digest(path, cache_dir=cache) != before

    @pytest.mark.parametrize("change", CHANGES)
    def test_after_a_change_that_gives_the_weights_another_meaning(self, tmp_path, monkeypatch, change):
        monkeypatch.setattr(fingerprint, "SLICE_NBYTES", 1000)
        path = checkpoint(tmp_path / "model")
        before = model_digest(path)
        CHANGES[change](path)
        assert model_digest(path) != before


class TestFormats:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
    def test_weights_that_are_no_safetensors_count(self, tmp_path, name):
        path = checkpoint(tmp_path / "model", shards=0)
        (path / name).write_bytes(b"weights")
        before = model_digest(path)
        (path / name).write_bytes(b"Weights")
        assert model_digest(path) != before

    def test_of_files_that_a_load_format_takes_alone(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        (path / "model.pt").write_bytes(b"weights")
        before = [weights_digest(str(path), None, load_format) for load_format in ("auto", "safetensors", "pt")]
        assert before[0] == before[1] != before[2]
        (path / "model.pt").write_bytes(b"Weights")
        assert weights_digest(str(path), None) == before[0]
        assert weights_digest(str(path), None, "pt") != before[2]

    def test_downloads_elsewhere_are_the_weights_and_the_hubs_cache_has_the_configuration(self, tmp_path, monkeypatch):
        """As vLLM does with `--download-dir`, whatever weights of the same name the hub's cache has as well."""
        whole, cached = checkpoint(tmp_path / "whole", seed=1), checkpoint(tmp_path / "cached")
        downloaded = checkpoint(tmp_path / "downloaded", seed=1)
        (downloaded / "config.json").unlink()
        folders = {None: cached, "there": downloaded}

        def snapshot_download(name, *, revision, cache_dir, local_files_only):
            assert (name, revision, local_files_only) == ("owner/name", "main", True)
            return str(folders[cache_dir])

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        assert weights_digest("owner/name", "main", "auto", "there") == weights_digest(str(whole), None)
        assert weights_digest("owner/name", "main") == weights_digest(str(cached), None)

    def test_a_single_gguf_file_is_a_model_and_its_folder_needs_no_config(self, tmp_path):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF1")
        before = model_digest(file)
        assert len(model_digest(tmp_path)) == 64
        file.write_bytes(b"GGUF2")
        assert model_digest(file) != before

    def test_what_training_left_behind_is_no_weight(self, tmp_path):
        path = checkpoint(tmp_path / "model", shards=0)
        (path / "training_args.bin").write_bytes(b"")
        with pytest.raises(ModelIdentityError, match="no weight files"):
            model_digest(path)

    def test_infinity_in_a_configuration_is_accepted(self, tmp_path):
        assert len(model_digest(checkpoint(tmp_path / "model", alibi_bias_max=float("inf")))) == 64


class TestErrors:
    def test_missing_weights_name_the_path_and_the_way_out(self, tmp_path):
        path = checkpoint(tmp_path / "model", shards=0)
        with pytest.raises(ModelIdentityError, match=r"model has no weight files .*set `model_id`"):
            model_digest(path)

    @pytest.mark.parametrize(
        "name, told",
        [("absent", "absent is not a folder"), ("x" * 300, "model path .*xxx cannot be read: File name too long")],
        ids=["absent", "impossible"],
    )
    def test_a_path_that_is_no_folder_is_named(self, tmp_path, name, told):
        with pytest.raises(ModelIdentityError, match=told):
            model_digest(tmp_path / name)

    def test_a_missing_or_damaged_configuration_is_named(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        (path / "config.json").write_text("{")
        with pytest.raises(ModelIdentityError, match=r"config\.json cannot be read as JSON"):
            model_digest(path)
        (path / "config.json").unlink()
        with pytest.raises(ModelIdentityError, match=r"has no config\.json: set `model_id`"):
            model_digest(path)

    def test_a_file_that_grows_while_it_is_read_is_refused(self, tmp_path, monkeypatch):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"part")
        original = fingerprint._slice_digest

        def grow(*args):
            with file.open("ab") as writer:
                writer.write(b"more")
            return original(*args)

        monkeypatch.setattr(fingerprint, "_slice_digest", grow)
        with pytest.raises(ModelIdentityError, match=r"model\.gguf changed while it was read"):
            model_digest(file)


class TestCache:
    def test_an_unchanged_file_is_not_read_again(self, tmp_path, reads):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        first = model_digest(path, cache_dir=cache)
        assert len(reads) == 2
        assert model_digest(path, cache_dir=cache) == first
        assert len(reads) == 2

    def test_without_a_cache_every_call_reads(self, tmp_path, reads):
        path = checkpoint(tmp_path / "model")
        model_digest(path)
        model_digest(path)
        assert len(reads) == 4

    @pytest.mark.parametrize("how", ["size and mtime kept", "replaced under its name"])
    def test_a_file_that_only_seems_unchanged_is_read_again(self, tmp_path, how):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        file = weights(path)[0]
        before, status = model_digest(path, cache_dir=cache), file.stat()
        other = Path(shutil.copy2(file, tmp_path / "other")) if how.startswith("replaced") else file
        flip_byte(other, 100)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(other, file)
        assert model_digest(path, cache_dir=cache) != before

    def test_a_file_that_was_just_written_is_not_remembered(self, tmp_path, reads, monkeypatch):
        monkeypatch.setattr(fingerprint, "SETTLED_S", 60.0)
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        model_digest(path, cache_dir=cache)
        model_digest(path, cache_dir=cache)
        assert len(reads) == 4

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 99}'])
    def test_a_damaged_entry_is_replaced(self, tmp_path, reads, damage):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        digest = model_digest(path, cache_dir=cache)
        for entry in cache.glob("*.json"):
            entry.write_bytes(damage)
        assert model_digest(path, cache_dir=cache) == digest
        assert len(reads) == 4
        assert model_digest(path, cache_dir=cache) == digest
        assert len(reads) == 4

    def test_the_folder_and_its_entries_are_private(self, tmp_path):
        cache = tmp_path / "cache"
        model_digest(checkpoint(tmp_path / "model"), cache_dir=cache)
        assert cache.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in cache.iterdir()} == {0o600}

    def test_a_folder_that_others_can_write_is_not_believed(self, tmp_path, reads, caplog):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        model_digest(path, cache_dir=cache)
        cache.chmod(0o777)
        model_digest(path, cache_dir=cache)
        model_digest(path, cache_dir=cache)
        assert len(reads) == 6
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and str(cache) in record.getMessage()

    def test_a_cache_that_cannot_be_made_costs_only_time(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        (tmp_path / "file").write_text("")
        assert model_digest(path, cache_dir=tmp_path / "file" / "cache") == model_digest(path)

    def test_callers_at_the_same_time_read_a_file_once(self, tmp_path, reads):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        callers = [threading.Thread(target=model_digest, args=(path,), kwargs={"cache_dir": cache}) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert sorted(reads) == [file.name for file in weights(path)]

    def test_a_reader_that_never_ends_is_not_waited_for(self, tmp_path, reads, monkeypatch):
        monkeypatch.setattr(fingerprint, "PATIENCE_S", 0.2)
        path, cache = checkpoint(tmp_path / "model", shards=1), tmp_path / "cache"
        cache.mkdir(mode=0o700)
        status = weights(path)[0].stat()
        with fingerprint._only_reader(cache / f"{status.st_dev:x}-{status.st_ino:x}.json"):
            model_digest(path, cache_dir=cache)
        assert len(reads) == 1

    def test_the_default_folder_follows_the_desktop_standard(self, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
        assert default_cache_dir() == Path("/var/cache/me/mooncake-connector")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/me")
        assert default_cache_dir() == Path("/home/me/.cache/mooncake-connector")


def test_the_fingerprint_of_an_empty_file_is_defined(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert fingerprint_files([tmp_path / "empty"], None)[tmp_path / "empty"].startswith("0-")


def test_few_slices_of_a_large_file_are_asked_for_ahead(tmp_path, monkeypatch):
    """A process that ends waits for each that was."""
    asked: set[Future] = set()
    ahead = []

    class Slice(Future):
        def result(self, timeout=None):
            asked.discard(self)
            return super().result(timeout)

    class Threads(Executor):
        def submit(self, call, /, *args, **kwargs):
            part = Slice()
            part.set_result(call(*args, **kwargs))
            asked.add(part)
            ahead.append(len(asked))
            return part

    monkeypatch.setattr(fingerprint, "SLICE_NBYTES", 100)
    (tmp_path / "model").write_bytes(os.urandom(100_000))
    found = fingerprint._fingerprint(tmp_path / "model", Threads())
    assert len(ahead) == 1000 and max(ahead) <= 16
    assert fingerprint_files([tmp_path / "model"], None) == {tmp_path / "model": found}


class TestAdapter:
    PATTERNS = ("adapter_config.json", "*.safetensors")

    def adapter(self, path: Path, rank: int = 8) -> Path:
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (path / "adapter_model.safetensors").write_bytes(b"weights")
        return path

    def test_it_is_its_files_not_its_folder(self, tmp_path):
        one, other = self.adapter(tmp_path / "one"), self.adapter(tmp_path / "other")
        (other / "README.md").write_text("not part of it")
        assert files_digest(one, self.PATTERNS) == files_digest(other, self.PATTERNS)

    def test_another_rank_or_other_weights_are_another_adapter(self, tmp_path):
        one, other = self.adapter(tmp_path / "one"), self.adapter(tmp_path / "other", rank=16)
        before = files_digest(one, self.PATTERNS)
        assert before != files_digest(other, self.PATTERNS)
        flip_byte(one / "adapter_model.safetensors", 3)
        assert files_digest(one, self.PATTERNS) != before

    def test_a_folder_without_its_files_is_refused(self, tmp_path):
        with pytest.raises(ModelIdentityError, match=r"no file that matches adapter_config\.json"):
            files_digest(tmp_path, self.PATTERNS)
