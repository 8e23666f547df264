"""Requests whose KV is not a function of their tokens alone: salts, adapters, images, embeddings, sessions."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PROMPT, Start
from simulated.waiting import wait_for
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from mooncake_connector.kv.keys import page_keys
from vllm_plugin.naming import AdapterKeys, chain_root, named_tokens


@pytest.mark.parametrize("salts", [("a", None), (None, "a"), ("a", "b")])
def test_requests_of_different_salts_do_not_share(start: Start, salts: tuple[str | None, str | None]) -> None:
    writer, reader = salts
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, cache_salt=writer)
    engine.ask(PROMPT, name="other", cache_salt=reader)
    assert engine.computed("other") == len(PROMPT) + 2


def test_requests_of_one_salt_share(start: Start) -> None:
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, cache_salt="tenant")
    engine.check(PROMPT, cache_salt="tenant", computed=4 + 2)
    assert engine.pages(PROMPT, salt="tenant") == [True] * 6
    assert not any(engine.pages(PROMPT))


def adapter(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
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
    engine = start(prefix_caching=False)
    engine.ask(PROMPT, lora_request=here)
    engine.ask(PROMPT, name="again", lora_request=there)
    assert engine.computed("again") == 4 + 2


def test_an_adapter_that_changes_on_disk_while_it_serves_has_no_name_any_more(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", b"weights")
    lora = LoRARequest("a", 1, str(folder))
    keys = AdapterKeys()
    before = keys.key(lora)
    (folder / "adapter_model.safetensors").write_bytes(b"others!")
    assert before is not None
    assert keys.key(lora) is None, "the engine still holds the old weights"
    reloaded = keys.key(LoRARequest("a", 1, str(folder), load_inplace=True))
    assert reloaded not in (None, before)


def test_a_large_adapter_is_hashed_without_the_scheduler_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("vllm_plugin.naming._FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("vllm_plugin.naming.files_digest", lambda *args, **kwargs: str(go_on.wait(60)))
    lora = LoRARequest("a", 1, str(adapter(tmp_path / "a", b"weights")))
    keys = AdapterKeys()
    assert keys.key(lora) is None
    go_on.set()
    keys.close()
    wait_for(lambda: keys.key(lora))
    assert keys.key(lora) == "True"


def test_an_adapter_whose_files_are_gone_is_served_without_the_pool(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT, lora_request=LoRARequest("gone", 1, "/nonexistent/adapter"))
    assert len(engine.texts["r0"]) == 3
    assert engine.num_pages() == 0


def with_image(tokens: list[int], image: str = "cat", offset: int = 20, length: int = 40) -> Request:
    place = PlaceholderRange(offset, length)
    feature = MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=place)
    return Request("r", tokens, SamplingParams(max_tokens=1), None, mm_features=[feature] if image else [])


def keys_of(request: Request) -> list[bytes]:
    root = chain_root(request, AdapterKeys())
    assert root is not None
    return page_keys(named_tokens(request, 0, request.num_tokens), 16, root=root)


TOKENS = [*range(20), *[99] * 40, *range(20)]


def test_two_images_behind_equal_placeholder_tokens_do_not_share() -> None:
    """Only pages before the image are common; the key of the page where it begins already differs."""
    one, two, plain = (keys_of(with_image(TOKENS, image)) for image in ("cat", "dog", ""))
    assert one[0] == two[0] == plain[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(one[1:], two[1:], plain[1:], strict=True))


def test_the_same_image_gives_the_same_keys_however_the_prompt_is_cut() -> None:
    request = with_image(TOKENS)
    whole = list(named_tokens(request, 0, 80))
    pieces = [token for start in range(0, 80, 7) for token in named_tokens(request, start, min(start + 7, 80))]
    assert [int(token) for token in pieces] == [int(token) for token in whole]
    assert keys_of(request) == keys_of(with_image(TOKENS))


def test_an_image_elsewhere_in_the_prompt_is_another_prompt() -> None:
    tokens = [*[99] * 40, *range(40)]
    first, second = (keys_of(with_image(tokens, "cat", offset, 20)) for offset in (0, 1))
    assert first[0] != second[0]


@pytest.mark.parametrize(
    "request_like",
    [{"prompt_embeds": torch.zeros(100, 64)}, {"resumable": True}],
    ids=["prompt_embeds", "resumable"],
)
def test_a_request_without_a_name_for_its_kv_is_left_alone(start: Start, faults, request_like: dict[str, Any]) -> None:
    engine = start()
    name = engine.add(PROMPT, 3, **request_like)
    engine.run(until=lambda: len(engine.texts[name]) == 3)
    engine.abort(name)
    engine.finish()
    assert engine.num_pages() == 0
    assert faults.calls["lookup"] == 0


def test_every_field_that_names_a_tenant_enters_the_root() -> None:
    plain: dict[str, Any] = {
        "prompt_embeds": None,
        "prompt_token_ids": [1],
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
    }
    assert chain_root(SimpleNamespace(**plain), AdapterKeys()) == b""  # type: ignore[arg-type]
    assert chain_root(SimpleNamespace(**plain | {"cache_salt": "a"}), AdapterKeys()) not in (b"", None)  # type: ignore[arg-type]
