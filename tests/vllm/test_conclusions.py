"""vLLM draws conclusions from a connector's presence, and from other settings to the connector."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from settings import Setup, multi_connector, transfer_config, vllm_config
from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig

import vllm_plugin
from vllm_plugin import conclusions

OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.fixture
def config(base_config: Any, pool: Path) -> Any:
    config = vllm_config(Setup(), base_config, pool)
    config.model_config = copy.deepcopy(config.model_config)
    return config


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in MultiConnector"])
def test_that_another_connector_takes_its_place_is_said(
    config: Any, pool: Path, caplog: pytest.LogCaptureFixture, inside: bool
) -> None:
    """`--kv-offloading-size` beside `--kv-transfer-config`: nothing would be stored, or found, without a word."""
    ours = transfer_config(Setup(), pool)
    config.kv_transfer_config = KVTransferConfig(**(multi_connector(ours, OTHER) if inside else ours))
    config.cache_config.kv_offloading_size = 1.0
    config._post_init_kv_transfer_config()
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
    (line,) = caplog.messages
    assert "--kv-offloading-size" in line and "OffloadingConnector in place of MooncakeKVConnector" in line


def test_nothing_is_said_where_there_was_another_connector_or_none(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for transfer in (KVTransferConfig(**OTHER), None):
        config.kv_transfer_config, config.cache_config.kv_offloading_size = transfer, 1.0
        config._post_init_kv_transfer_config()
    config.cache_config.kv_offloading_size = None
    config._post_init_kv_transfer_config()
    assert not caplog.messages


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("allowed", [False, True])
def test_clients_may_send_embeddings_of_images_where_that_was_allowed_and_never_leave_them_out(
    config: Any, role: Any, allowed: bool
) -> None:
    """vLLM says of them that they may end the engine, and to allow them for trusted users alone."""
    media = config.model_config.multimodal_config = MultiModalConfig(enable_mm_embeds=allowed)
    config.kv_transfer_config.kv_role = role
    for _ in range(2):  # vLLM concludes again wherever it changes a configuration
        config._resolve_mm_embedding_inputs()
        assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (allowed, False)


def test_nor_inside_multi_connector_and_a_line_says_so(
    config: Any, pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of them brings a prompt is known when it comes, so ours may have to compute there as well."""
    caplog.set_level("INFO")
    media = config.model_config.multimodal_config = MultiModalConfig()
    config.kv_transfer_config = KVTransferConfig(**multi_connector(transfer_config(Setup(), pool), OTHER))
    config._resolve_mm_embedding_inputs()
    assert (media.enable_mm_embeds, media.allow_missing_mm_embeddings) == (False, False)
    assert "may send them where --enable-mm-embeds is given" in caplog.text


def test_what_a_later_version_of_vllm_passes_reaches_its_method_and_its_errors_the_user(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later:
        kv_transfer_config = model_config = None

        def _conclude(self, what: str, *, how: str) -> str:
            if not how:
                raise ValueError("vLLM's own")
            return what + how

    def fail(*args: Any) -> None:
        raise OSError("ours")

    conclusions._wrap(Later, "_conclude", fail, fail)
    assert Later()._conclude("a", how="b") == "ab"
    with pytest.raises(ValueError, match="vLLM's own"):
        Later()._conclude("a", how="")


def test_others_may_allow_what_they_want(config: Any) -> None:
    """Another connector, or one that brings what an encoder computed elsewhere."""
    encoder = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_consumer")
    ours = config.kv_transfer_config
    for transfer, elsewhere in ((KVTransferConfig(**OTHER), None), (ours, encoder)):
        media = config.model_config.multimodal_config = MultiModalConfig()
        config.kv_transfer_config, config.ec_transfer_config = transfer, elsewhere
        config._resolve_mm_embedding_inputs()
        assert media.enable_mm_embeds and media.allow_missing_mm_embeddings


def test_registering_again_wraps_nothing_twice() -> None:
    before = VllmConfig._post_init_kv_transfer_config, VllmConfig._resolve_mm_embedding_inputs
    vllm_plugin.register()
    assert before == (VllmConfig._post_init_kv_transfer_config, VllmConfig._resolve_mm_embedding_inputs)
