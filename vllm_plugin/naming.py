"""How the key chain names a request's tokens: where it starts, and what stands for an adapter or an image.

Two requests share a page if and only if their names agree up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.fingerprint import default_cache_dir
from mooncake_connector.kv.identity.model import LORA_FILES, files_digest
from mooncake_connector.kv.keys import adapter_root_digest, content_tokens, root_digest
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.threads import DaemonThreads
from vllm_plugin.adapter_files import AdapterFiles, Signature, read_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_FIRST_WAIT_S = 0.05
"""How long loading an adapter waits for its digest; a large one is named from a later request on."""

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd: modulo 2^64 a value times it is another one for each value. Items that lie over each other do not cancel out."""
_NO_TOKEN = np.uint64(1 << 63)

logger = get_logger(__name__)


def chain_root(request: Request, adapters: AdapterKeys) -> bytes | None:
    """Where a request's key chain starts: its salt and its LoRA adapter. None: its KV cannot be named by tokens."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return None
    if request.lora_request is None:
        return root_digest(None, request.cache_salt)
    adapter = adapters.key(request.lora_request)
    return None if adapter is None else adapter_root_digest(adapter, request.cache_salt)


def names_media(vllm_config: VllmConfig) -> bool:
    """Whether a request says by a hash what its images, videos and sound are. With neither of its own caches in use
    vLLM numbers them, from 1 on in every process."""
    multimodal = vllm_config.model_config.multimodal_config
    caches = multimodal is None or multimodal.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching
    return bool(caches)


def named_tokens(request: Request, start: int, stop: int) -> list[int] | npt.NDArray[np.uint64]:
    """Tokens `[start, stop)` as the key chain sees them: multimodal placeholders are replaced by their content.

    Items may lie over each other: the sound of a video has the placeholders of the video (`use_audio_in_video`). One
    that has another number of them was processed in another way.
    """
    tokens = request.all_token_ids[start:stop]
    overlaps = [
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
        for feature in request.mm_features
        if feature.mm_position.offset < stop and feature.mm_position.offset + feature.mm_position.length > start
    ]
    if not overlaps:
        return tokens
    named = np.asarray(tokens, dtype=np.uint64)
    for offset, length, identifier in overlaps:
        first, last = max(offset, start), min(offset + length, stop)
        beneath = named[first - start : last - start] * _SPREAD
        content = content_tokens(f"{length}:{identifier}", last - first, start=first - offset)
        named[first - start : last - start] = (beneath ^ content) | _NO_TOKEN
    return named


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One that vLLM has; `signature` is what its files said before, None where they did not, or say otherwise since."""

    path: str
    signature: Signature | None
    digest: Future[str] | None


class AdapterKeys:
    """Who a LoRA adapter is: a digest of its files, made once in the background and kept while it serves.

    The scheduler asks for every request with an adapter, so it reads file times only. What the engine holds in memory
    is what the files said when it loaded them: an adapter whose files changed since, or said nothing before, has no
    name, until vLLM is told to load it again in place.

    Args:
        modules: of an adapter this instance applies these alone (`--lora-target-modules`).
    """

    def __init__(self, modules: Sequence[str] | None = None) -> None:
        self._files = AdapterFiles()
        self._part = ":" + ",".join(sorted(set(modules))) if modules else ""
        self._adapters: dict[int, _Adapter] = {}
        """By vLLM's number: a name and a path may stand for another one tomorrow."""
        self._signatures: dict[str, Signature | None] = {}
        """Path -> what its files said when they were loaded last."""
        self._stale: set[str] = set()
        """Paths of whose former files vLLM's own cache may have KV: it takes name and path for the adapter."""
        self._hasher = DaemonThreads(1, "mooncake-connector-adapter")

    def look(self, request: LoRARequest) -> Signature | None:
        """What the adapter's files say now; None where they cannot be read, or do not say it in time."""
        try:
            signature = self._files.signature(request.lora_path)
        except OSError as error:
            _log_not_cached(request, error)
            return None
        if signature is None:
            _log_not_cached(request, "their file system does not answer in time")
        return signature

    def used(self, request: LoRARequest) -> bool:
        """A request has it, so the engine loads it now unless it was loaded. Whether that takes another one's place."""
        if request.lora_int_id in self._adapters and not request.load_inplace:
            return False
        return self.loaded(request, self.look(request))

    def loaded(self, request: LoRARequest, signature: Signature | None) -> bool:
        """The engine has loaded an adapter, or does so now, unless it had it. Whether that takes another one's place.

        `signature`: of its files before that.
        """
        path, former = request.lora_path, self._adapters.get(request.lora_int_id)
        if former is not None and former.signature == signature:
            return False
        if former is not None and not request.load_inplace:  # the former may have been removed before
            self._lose(request, former)
            return False
        if self._signatures.get(path, signature) != signature:
            self._stale.add(path)
        self._signatures[path] = signature
        digest = None if signature is None else self._hasher.submit(_digest, path, signature)
        self._adapters[request.lora_int_id] = _Adapter(path, signature, digest)
        if digest is not None:
            wait([digest], _FIRST_WAIT_S)
        return former is not None

    def key(self, request: LoRARequest) -> str | None:
        """Name by its files of an adapter that was loaded, or None: not known yet, not readable, or changed since."""
        adapter = self._adapters.get(request.lora_int_id)
        if adapter is None or (signature := self.look(request)) is None:
            return None
        try:
            if adapter.digest is None or adapter.signature != signature:
                self._lose(request, adapter)
                raise ModelIdentityError(f"the files in {request.lora_path} may not be those that were loaded")
            return adapter.digest.result(0.0) + self._part
        except NotYet:
            return None
        except (ModelIdentityError, OSError) as error:
            _log_not_cached(request, error)
            return None

    def _lose(self, request: LoRARequest, adapter: _Adapter) -> None:
        """Also if its files say again what they said: one that workers dropped for others is read again, and that may
        have been meanwhile."""
        self._adapters[request.lora_int_id] = _Adapter(adapter.path, None, None)
        for path in (adapter.path, request.lora_path):
            self._signatures[path] = None
            self._stale.add(path)

    def is_stale(self, request: LoRARequest) -> bool:
        """Whether a hit in vLLM's own cache may be KV of former files."""
        return request.lora_path in self._stale

    def own_cache_emptied(self) -> None:
        """vLLM has forgotten all KV of its own."""
        self._stale.clear()

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)


def _log_not_cached(request: LoRARequest, why: object) -> None:
    said = "requests with the adapter %s are not cached: %s"
    log_once(f"lora:{request.lora_path}:{why}", said, request.lora_path, why, logger=logger)


def _digest(path: str, signature: Signature) -> str:
    digest = files_digest(Path(path), LORA_FILES, cache_dir=default_cache_dir())
    if read_files(path)[0] != signature:
        raise ModelIdentityError(f"the files in {path} changed while they were read")
    return digest
