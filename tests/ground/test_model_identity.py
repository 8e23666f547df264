"""A model is what its files hold: not where they lie, what they are called, or what the server calls it."""

import json
import logging
import os
import shutil
import struct
import threading
from pathlib import Path

import pytest
from causes import forget_causes

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity import fingerprint
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


class TestSameModel:
    def test_in_another_folder(self, tmp_path):
        one = checkpoint(tmp_path / "one")
        other = shutil.copytree(one, tmp_path / "somewhere" / "else")
        assert model_digest(one) == model_digest(other)

    def test_behind_symbolic_links_as_in_a_hub_cache(self, tmp_path):
        one = checkpoint(tmp_path / "blobs")
        linked = tmp_path / "snapshot"
        linked.mkdir()
        for file in one.iterdir():
            (linked / file.name).symlink_to(file)
        assert model_digest(one) == model_digest(linked)

    def test_with_shards_renamed(self, tmp_path):
        one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
        first, second = weights(other)
        first.rename(other / "z.safetensors")
        second.rename(other / "a.safetensors")
        assert model_digest(one) == model_digest(other)

    @pytest.mark.parametrize("field", ["_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"])
    def test_with_another_value_of_a_volatile_field(self, tmp_path, field):
        one = checkpoint(tmp_path / "one", **{field: "a"})
        other = checkpoint(tmp_path / "other", **{field: "b"})
        assert model_digest(one) == model_digest(other)

    def test_with_a_volatile_field_of_a_nested_configuration(self, tmp_path):
        one = checkpoint(tmp_path / "one", text_config={"hidden_size": 8, "torch_dtype": "float16"})
        other = checkpoint(tmp_path / "other", text_config={"hidden_size": 8})
        assert model_digest(one) == model_digest(other)

    def test_with_keys_of_its_configuration_in_another_order(self, tmp_path):
        one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
        (other / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
        assert model_digest(one) == model_digest(other)

    def test_with_files_beside_it_that_no_engine_loads(self, tmp_path):
        one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
        for name in ("README.md", "tokenizer.json", "generation_config.json", "pytorch_model.bin"):
            (other / name).write_text("{}")
        assert model_digest(one) == model_digest(other)

    def test_of_every_release(self, tmp_path):
        """Existing pools keep their pages."""
        expected = "dd5f4957d0dead5d5b61e8ae3e581660b754c957c11c5edea67dba8413fb40c2"
        assert model_digest(checkpoint(tmp_path / "one")) == expected


class TestAnotherModel:
    @pytest.mark.parametrize("offset", [0, 5000, -1], ids=["first byte", "middle", "last byte"])
    @pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
    def test_when_one_byte_of_the_weights_under_one_path_changes(self, tmp_path, offset, cached):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache" if cached else None
        before = model_digest(path, cache_dir=cache)
        flip_byte(weights(path)[1], offset)
        assert model_digest(path, cache_dir=cache) != before

    def test_when_a_byte_beyond_the_first_slice_changes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fingerprint, "SLICE_NBYTES", 1000)
        path = checkpoint(tmp_path / "model")
        before = model_digest(path)
        flip_byte(weights(path)[0], 7777)
        assert model_digest(path) != before

    def test_when_two_slices_change_places(self, tmp_path, monkeypatch):
        monkeypatch.setattr(fingerprint, "SLICE_NBYTES", 1000)
        path = checkpoint(tmp_path / "model", shards=1)
        (file,) = weights(path)
        file.write_bytes(b"a" * 1000 + b"b" * 1000)
        before = model_digest(path)
        file.write_bytes(b"b" * 1000 + b"a" * 1000)
        assert model_digest(path) != before

    def test_when_a_shard_is_missing(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        before = model_digest(path)
        weights(path)[0].unlink()
        assert model_digest(path) != before

    def test_when_a_shard_is_there_twice(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        before = model_digest(path)
        shutil.copy(weights(path)[0], path / "again.safetensors")
        assert model_digest(path) != before

    def test_when_its_architecture_differs(self, tmp_path):
        one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other", rope_theta=500000.0)
        assert model_digest(one) != model_digest(other)

    @pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "modeling_custom.py"])
    def test_when_a_file_that_gives_the_weights_meaning_is_added(self, tmp_path, name):
        path = checkpoint(tmp_path / "model")
        before = model_digest(path)
        (path / name).write_text("{}")
        assert model_digest(path) != before


class TestFormats:
    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
    def test_weights_that_are_no_safetensors_count(self, tmp_path, name):
        path = checkpoint(tmp_path / "model", shards=0)
        (path / name).write_bytes(b"weights")
        before = model_digest(path)
        (path / name).write_bytes(b"Weights")
        assert model_digest(path) != before

    def test_a_single_gguf_file_is_a_model(self, tmp_path):
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF1")
        before = model_digest(file)
        file.write_bytes(b"GGUF2")
        assert model_digest(file) != before

    def test_a_folder_of_gguf_needs_no_config(self, tmp_path):
        (tmp_path / "model.gguf").write_bytes(b"GGUF1")
        assert len(model_digest(tmp_path)) == 64

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

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(ModelIdentityError, match="absent is not a folder"):
            model_digest(tmp_path / "absent")

    def test_a_path_that_cannot_exist_is_named(self, tmp_path):
        with pytest.raises(ModelIdentityError, match=r"model path .*xxx cannot be read: File name too long"):
            model_digest(tmp_path / ("x" * 300))

    def test_a_missing_configuration_is_named(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        (path / "config.json").unlink()
        with pytest.raises(ModelIdentityError, match=r"has no config\.json: set `model_id`"):
            model_digest(path)

    def test_a_damaged_configuration_is_named(self, tmp_path):
        path = checkpoint(tmp_path / "model")
        (path / "config.json").write_text("{")
        with pytest.raises(ModelIdentityError, match=r"config\.json cannot be read as JSON"):
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

    def test_a_file_whose_size_and_mtime_were_kept_is_read_again(self, tmp_path):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        file = weights(path)[0]
        before, status = model_digest(path, cache_dir=cache), file.stat()
        flip_byte(file, 100)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert model_digest(path, cache_dir=cache) != before

    def test_a_file_replaced_under_its_name_is_read_again(self, tmp_path):
        path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
        file = weights(path)[0]
        before = model_digest(path, cache_dir=cache)
        other = shutil.copy2(file, tmp_path / "other")
        flip_byte(Path(other), 100)
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

    def test_another_rank_is_another_adapter(self, tmp_path):
        one, other = self.adapter(tmp_path / "one"), self.adapter(tmp_path / "other", rank=16)
        assert files_digest(one, self.PATTERNS) != files_digest(other, self.PATTERNS)

    def test_other_weights_are_another_adapter(self, tmp_path):
        path = self.adapter(tmp_path / "one")
        before = files_digest(path, self.PATTERNS)
        flip_byte(path / "adapter_model.safetensors", 3)
        assert files_digest(path, self.PATTERNS) != before

    def test_a_folder_without_its_files_is_refused(self, tmp_path):
        with pytest.raises(ModelIdentityError, match=r"no file that matches adapter_config\.json"):
            files_digest(tmp_path, self.PATTERNS)
