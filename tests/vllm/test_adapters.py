"""Requests of LoRA adapters, whose files may change, be replaced, or lie where nobody answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cases import PROMPT, Start
from core import Core
from simulated.waiting import wait_for
from store.tiers.fuse import Mount, fuse_mount
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest

from mooncake_connector.threads import apart
from vllm_plugin import adapter_files
from vllm_plugin.adapter_files import AdapterFiles
from vllm_plugin.naming import AdapterKeys
from vllm_plugin.prefix.scheduler import PrefixScheduler


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return write(folder, content)


def write(folder: Path, content: bytes) -> Path:
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def test_requests_of_different_adapters_do_not_share_whatever_their_names(start: Start, tmp_path: Path) -> None:
    one = LoRARequest("same", 1, str(adapter(tmp_path / "one", b"weights of one")))
    two = LoRARequest("same", 2, str(adapter(tmp_path / "two", b"weights of two")))
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, lora_request=one)
    for name, lora in (("base", None), ("two", two)):
        engine.ask(PROMPT, name=name, lora_request=lora)  # KV of another adapter would be wrong here
        assert engine.computed(name) == len(PROMPT) + 2
    engine.ask(PROMPT, name="one", lora_request=one)
    assert engine.computed("one") == 4 + 2


def test_one_adapter_is_shared_wherever_it_lies(start: Start, tmp_path: Path) -> None:
    here = LoRARequest("a", 1, str(adapter(tmp_path / "here", b"weights")))
    there = LoRARequest("b", 1, str(adapter(tmp_path / "there", b"weights")))
    start().ask(PROMPT, lora_request=here)
    other = start()
    other.ask(PROMPT, name="again", lora_request=there)
    assert other.computed("again") == 4 + 2


def test_a_part_of_an_adapter_is_another_one(
    start: Start, folder: Path, base_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--lora-target-modules`: of its files this instance applies some modules alone. Without it pages are shared."""
    for modules in (None, ["o_proj"], ["qkv_proj", "o_proj"]):
        monkeypatch.setattr(base_config, "lora_config", LoRAConfig(target_modules=modules))
        engine = start()
        engine.ask(PROMPT, name="adapted", lora_request=lora(folder))
        assert engine.computed("adapted") == len(PROMPT) + 2
        engine.ask(PROMPT, name="plain")
        assert engine.computed("plain") == (4 + 2 if modules else len(PROMPT) + 2)
        engine.shut_down()
    monkeypatch.setattr(base_config, "lora_config", LoRAConfig(target_modules=["o_proj", "qkv_proj"]))
    engine = start()
    engine.ask(PROMPT, name="adapted", lora_request=lora(folder))
    assert engine.computed("adapted") == 4 + 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an adapter with the number 1, as `lora` says."""
    return adapter(tmp_path / "a", b"weights")


def lora(folder: Path, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("a", 1, str(folder), load_inplace=load_inplace)


def test_an_adapter_that_changes_on_disk_has_no_name_until_it_is_loaded_again_in_place(folder: Path) -> None:
    keys = AdapterKeys()
    assert keys.key(lora(folder)) is None
    assert not keys.used(lora(folder))
    before = keys.key(lora(folder))
    assert before is not None
    write(folder, b"others!")
    assert not keys.used(lora(folder))
    assert keys.key(lora(folder)) is None, "the engine still holds the old weights"
    assert keys.used(lora(folder, load_inplace=True))
    assert keys.key(lora(folder)) not in (None, before)


def test_an_adapter_that_is_loaded_under_the_number_of_another_one_has_no_name(folder: Path, tmp_path: Path) -> None:
    """vLLM goes on with the one that it has; or with the other one, if it had dropped the first."""
    keys = AdapterKeys()
    keys.used(lora(folder))
    assert keys.key(lora(folder)) is not None
    other = lora(adapter(tmp_path / "b", b"others!"))
    assert not keys.used(other)
    for one in (other, lora(folder)):
        assert keys.key(one) is None and keys.is_stale(one)


def test_an_adapter_that_changes_and_changes_back_has_no_name_until_it_is_loaded_again(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    """vLLM drops adapters for others where there is no room, and reads them again: also what was there meanwhile."""
    engine, current = start(), tmp_path / "current"

    def link(to: Path) -> None:
        current.unlink(missing_ok=True)
        current.symlink_to(to)

    link(folder)
    engine.ask(PROMPT, lora_request=lora(current))
    link(adapter(tmp_path / "b", b"others!"))
    engine.ask(PROMPT[1:], lora_request=lora(current))
    link(folder)
    engine.ask(PROMPT[2:], lora_request=lora(current))
    assert engine.num_pages() == 6
    again = lora(current, load_inplace=True)
    Core(engine).add_lora(again)
    engine.ask([*PROMPT[1:], *PROMPT], lora_request=again)
    assert engine.num_pages() == 6, "it begins with what vLLM's own cache has of the other one"
    engine.ask(PROMPT[3:], lora_request=again)
    assert engine.num_pages() == 2 * 6


def test_a_file_beside_an_adapter_may_come_and_go(folder: Path) -> None:
    keys = AdapterKeys()
    keys.used(lora(folder))
    before = keys.key(lora(folder))
    (folder / "README.md").write_text("what it was trained on")
    assert keys.key(lora(folder)) == before is not None


def test_files_that_change_before_the_first_request_name_nothing(start: Start, folder: Path) -> None:
    engine = start()
    Core(engine).add_lora(lora(folder))
    write(folder, b"others!")
    engine.ask(PROMPT, lora_request=lora(folder))
    assert engine.num_pages() == 0


def test_an_adapter_that_could_not_be_loaded_again_has_no_name(start: Start, folder: Path) -> None:
    engine = start()
    engine.ask(PROMPT, lora_request=lora(folder))
    write(folder, b"others!")
    with pytest.raises(ValueError, match="not a rank"):
        Core(engine).add_lora(lora(folder, load_inplace=True), meanwhile=lambda: int("not a rank"))
    engine.ask(PROMPT[1:], lora_request=lora(folder))
    assert engine.num_pages() == 6


def test_files_that_change_while_they_are_loaded_name_nothing(start: Start, folder: Path) -> None:
    engine = start()
    Core(engine).add_lora(lora(folder), meanwhile=lambda: write(folder, b"others!"))
    engine.ask(PROMPT, lora_request=lora(folder))
    assert engine.num_pages() == 0


def test_what_vllms_own_cache_has_of_an_adapter_is_not_stored_for_the_one_in_its_place(
    start: Start, folder: Path
) -> None:
    engine, again = start(), lora(folder, load_inplace=True)
    core = Core(engine)
    engine.ask(PROMPT, lora_request=lora(folder))
    write(folder, b"others!")
    core.add_lora(again)
    engine.ask([*PROMPT, *PROMPT], lora_request=again)
    assert engine.num_pages() == 6
    engine.ask(PROMPT[1:], lora_request=again)
    assert engine.num_pages() == 2 * 6
    assert core.reset(connector=False)
    for _ in range(2):  # the second one begins with a hit
        engine.ask(PROMPT, lora_request=again)
        assert engine.num_pages() == 3 * 6
    engine.ask([*PROMPT, *PROMPT], lora_request=again)
    assert engine.num_pages() == 3 * 6 + 6


@pytest.mark.parametrize("loaded", ["nowhere", "here", "elsewhere"])
def test_a_request_whose_adapter_is_replaced_stores_nothing_more(
    start: Start, folder: Path, tmp_path: Path, loaded: str
) -> None:
    engine = start()
    name = engine.add(PROMPT, 60, lora_request=lora(folder))
    engine.run(until=lambda: len(engine.texts[name]) > 2)
    wait_for(lambda: engine.num_pages() == 6)
    if loaded != "elsewhere":  # a worker may read the files again at any time
        write(folder, b"others!")
    if loaded != "nowhere":
        place = folder if loaded == "here" else adapter(tmp_path / "b", b"others!")
        Core(engine).add_lora(lora(place, load_inplace=True))
    engine.run()
    assert engine.num_pages() == 6


@pytest.mark.parametrize("changes", [False, True])
def test_what_a_request_leaves_at_its_end_is_stored_of_the_adapter_that_was_loaded(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    monkeypatch.setattr(PrefixScheduler, "_completes_pages", lambda *args: False)
    engine = start()
    name = engine.add(PROMPT, 4, lora_request=lora(folder))
    engine.run(until=lambda: engine.texts[name])
    if changes:
        write(folder, b"others!")
    engine.run()
    assert engine.num_pages() == (0 if changes else 6)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_request_that_waits_while_its_adapter_is_replaced_loads_no_page_of_the_former(
    start: Start, folder: Path, loaded: bool
) -> None:
    """Also where vLLM was not told: workers that had dropped it read its files with this request."""
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, lora_request=lora(folder))
    name = engine.add(PROMPT, lora_request=lora(folder))
    write(folder, b"others!")
    if loaded:
        Core(engine).add_lora(lora(folder, load_inplace=True))
    engine.run()
    assert engine.computed(name) == len(PROMPT) + 2


def test_a_large_adapter_is_hashed_without_the_scheduler_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("vllm_plugin.naming._FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("vllm_plugin.naming.files_digest", lambda *args, **kwargs: str(go_on.wait(60)))
    keys = AdapterKeys()
    keys.used(lora(folder))
    assert keys.key(lora(folder)) is None
    go_on.set()
    keys.close()
    wait_for(lambda: keys.key(lora(folder)))
    assert keys.key(lora(folder)) == "True"


def test_an_adapter_that_is_added_under_the_number_of_one_that_was_removed_leaves_that_no_name(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    engine = start()
    engine.ask(PROMPT, lora_request=lora(folder))
    Core(engine).add_lora(lora(adapter(tmp_path / "b", b"others!")))
    engine.ask(PROMPT[1:], lora_request=lora(folder))
    assert engine.num_pages() == 6


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    with fuse_mount(tmp_path) as mount:
        yield mount


@contextmanager
def hanging(mount: Mount) -> Iterator[None]:
    """Its file system answers nobody, and looks are not waited for long; each looks, unless one before still does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_files, "_FIRST_LOOK_S", 0.05)
        patch.setattr(adapter_files, "_LOOK_S", 0.05)
        patch.setattr(adapter_files, "_LATE_PAUSE_S", 0.0)
        mount.hang()
        yield
        mount.go_on()


def test_an_adapter_on_a_dead_file_system_does_not_stop_the_scheduler(start: Start, mount: Mount) -> None:
    remote = lora(adapter(mount.path / "a", b"weights"))
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, lora_request=remote)
    pages = engine.num_pages()
    with hanging(mount):
        for name in ("one", "two", "three"):
            engine.ask([*reversed(PROMPT)], name=name, lora_request=remote)
            assert engine.computed(name) == len(PROMPT) + 2
    assert engine.num_pages() == pages > 0, "whose KV this is nobody knows"
    wait_for(lambda: engine.connector._scheduler.prefix._adapters.look(remote))
    engine.ask(PROMPT, name="back", lora_request=remote)
    assert engine.computed("back") == 4 + 2


def test_loading_an_adapter_waits_for_no_dead_file_system(start: Start, mount: Mount) -> None:
    """The files may have changed between what the workers read and the first answer, as here."""
    folder = adapter(mount.path / "a", b"weights")
    engine = start()
    with hanging(mount):
        Core(engine).add_lora(lora(folder))
    write(folder, b"others!")
    engine.ask(PROMPT, lora_request=lora(folder))
    assert engine.num_pages() == 0


def test_an_adapter_that_was_loaded_unseen_has_no_name_until_it_is_loaded_again(mount: Mount) -> None:
    folder = adapter(mount.path / "a", b"weights")
    keys = AdapterKeys()
    with hanging(mount):
        keys.used(lora(folder))
    wait_for(lambda: keys.look(lora(folder)))
    keys.used(lora(folder))
    assert keys.key(lora(folder)) is None
    assert keys.used(lora(folder, load_inplace=True))
    assert keys.key(lora(folder))


def test_adapters_elsewhere_are_seen_while_one_is_on_a_dead_file_system(mount: Mount, folder: Path) -> None:
    files, waits = AdapterFiles(), list[float]()
    dead = str(adapter(mount.path / "dead", b"weights"))
    with hanging(mount), pytest.MonkeyPatch.context() as patch:
        assert files.signature(dead) is None
        patch.setattr(adapter_files, "_LOOK_S", 60.0)
        patch.setattr(adapter_files, "wait", lambda looks, wait_s: waits.append(wait_s) or wait(looks, wait_s))
        assert files.signature(str(folder))
    assert waits == [60.0], "it may be on the same file system, and is not waited for like a first one"


def test_one_thread_at_most_waits_for_a_dead_file_system(mount: Mount) -> None:
    files, dead = AdapterFiles(), str(adapter(mount.path / "a", b"weights"))
    with hanging(mount):
        before = threading.active_count()
        for _ in range(5):
            assert files.signature(dead) is None
        assert threading.active_count() == before + 1


def test_only_file_systems_that_may_not_answer_have_a_thread(
    mount: Mount, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the folder is on, here, may not be among those that are known to be local."""
    remote = adapter(mount.path / "a", b"weights")
    mounts, local, other = folder.parent / "mounts", os.stat(folder).st_dev, os.stat(remote).st_dev
    mounts.write_text(
        f"21 1 {os.major(local)}:{os.minor(local)} / / rw shared:1 - ext4 /dev/vda rw\n"
        f"22 1 {os.major(other)}:{os.minor(other)} / /mnt rw - fuse.bindfs bindfs rw\n"
    )
    monkeypatch.setattr(adapter_files, "_MOUNTS", mounts)
    files, looks = AdapterFiles(), list[Any]()
    monkeypatch.setattr(adapter_files, "apart", lambda work, path: looks.append(path) or apart(work, path))
    for _ in range(3):
        assert files.signature(str(folder)) == adapter_files.read_files(str(folder))[0]
    assert len(looks) == 1
    (folder / "linked.safetensors").symlink_to(remote / "adapter_model.safetensors")
    others = AdapterFiles()
    for _ in range(3):
        assert others.signature(str(folder)) and files.signature(str(remote))
    assert len(looks) == 1 + 3 + 3


def test_a_link_that_leads_to_another_file_system_is_looked_at_as_that_one_asks_for(
    mount: Mount, folder: Path, tmp_path: Path
) -> None:
    files, current = AdapterFiles(), tmp_path / "current"
    files._local[str(current)] = {os.stat(folder).st_dev}
    current.symlink_to(adapter(mount.path / "a", b"weights"))
    assert files.signature(str(current))
    with hanging(mount):
        assert files.signature(str(current)) is None


def test_an_adapter_whose_files_are_gone_is_served_without_the_pool(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT, lora_request=LoRARequest("gone", 1, "/nonexistent/adapter"))
    assert len(engine.texts["r0"]) == 3
    assert engine.num_pages() == 0
