"""Requests whose KV is not a function of their tokens alone: salts, images, embeddings, sessions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import PROMPT, Start
from settings import vllm_config
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from mooncake_connector.kv.keys import page_keys
from vllm_plugin.naming import AdapterKeys, chain_root, named_tokens, names_media


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


def with_video(video: str, sound: str, length: int = 40) -> Request:
    """As vLLM's processor of Qwen2.5-Omni describes a video with its sound (`use_audio_in_video`): one place for both,
    of which each has its own tokens."""
    is_sound = torch.arange(length) % 2 == 0
    features = [
        MultiModalFeatureSpec(data=None, modality=kind, identifier=item, mm_position=PlaceholderRange(20, length, at))
        for kind, item, at in (("video", video, ~is_sound), ("audio", sound, is_sound))
    ]
    return Request("r", TOKENS, SamplingParams(max_tokens=1), None, mm_features=features)


def test_items_that_lie_over_each_other_all_count() -> None:
    videos = [with_video(*items) for items in (("cat", "silence"), ("dog", "silence"), ("cat", "meow"), ("cat", "cat"))]
    keys = [keys_of(request) for request in (*videos, with_image(TOKENS, "cat"))]
    assert len({one[0] for one in keys}) == 1
    assert all(len(set(same)) == len(keys) for same in zip(*(one[1:] for one in keys), strict=True))
    assert keys_of(with_video("cat", "silence")) == keys[0]


def test_an_item_that_became_another_number_of_tokens_is_another_one() -> None:
    """Processed with other settings: one with more pixels begins with the same placeholders, and other embeddings."""
    small, large = (keys_of(with_image(TOKENS, length=length)) for length in (40, 60))
    assert small[0] == large[0]
    assert small[1] != large[1], "a page of placeholders alone"


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "named"), [(0, False, False), (0, True, True), (1, False, True)]
)
def test_media_that_vllm_numbers_have_no_name(
    start: Start,
    base_config: Any,
    pool: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_gb: int,
    prefix_caching: bool,
    named: bool,
) -> None:
    """The first image of a server is that of the one before it, by what vLLM calls it."""
    media = MultiModalConfig(mm_processor_cache_gb=cache_gb)
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)),
        _validate_mm_uuids=lambda *args: None,
    )
    images = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    called = BaseRenderer._process_mm_uuids(renderer, {}, images, {}, "renderer0-mm-1")  # type: ignore[arg-type]
    assert (called == {}) == named
    engine = start(prefix_caching=prefix_caching)
    monkeypatch.setattr(base_config.model_config, "multimodal_config", media)
    config = vllm_config(engine.setup, base_config, pool)
    monkeypatch.setattr(engine.prefix, "_names_media", names_media(config))
    for request, expected in ((with_image(TOKENS), named), (with_image(TOKENS, ""), True)):
        assert (engine.prefix.track(request).root is not None) == expected
        engine.prefix.finished(request)


@pytest.mark.parametrize("request_like", [{"prompt_embeds": torch.zeros(100, 64)}, {"resumable": True}], ids=" ".join)
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
