"""How the key chain names a request's tokens: where it starts, and what stands for an adapter or an image.

Two requests share a page if and only if their names agree up to its end.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_FIRST_WAIT_S = 0.05
"""How long loading an adapter waits for its digest; a large one is named from a later request on."""

Signature = tuple[tuple[str, int, int, int], ...]

logger = get_logger(__name__)


def chain_root(request: Request, adapters: AdapterKeys) -> bytes | None:
    """Where a request's key chain starts: its salt and its LoRA adapter. None: its KV cannot be named by tokens."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None or request.resumable:
        return None
    if request.lora_request is None:
        return root_digest(None, request.cache_salt)
    adapter = adapters.key(request.lora_request)
    return None if adapter is None else adapter_root_digest(adapter, request.cache_salt)


def named_tokens(request: Request, start: int, stop: int) -> list[int] | npt.NDArray[np.uint64]:
    """Tokens `[start, stop)` as the key chain sees them: multimodal placeholders are replaced by their content."""
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
        named[first - start : last - start] = content_tokens(identifier, last - first, start=first - offset)
    return named


@dataclass(frozen=True, slots=True)
class _Adapter:
    signature: Signature
    digest: Future[str]


class AdapterKeys:
    """Who a LoRA adapter is: a digest of its files, made once in the background and kept while it serves.

    The scheduler asks for every request with an adapter, so it reads file times only. What the engine holds in memory
    is what the files said when it loaded them: an adapter whose files changed since has no name, until vLLM is told to
    load it again in place.
    """

    def __init__(self) -> None:
        self._adapters: dict[int, _Adapter] = {}
        """By vLLM's number: a name and a path may stand for another one tomorrow."""
        self._signatures: dict[str, Signature] = {}
        """Path -> what its files said when they were loaded last."""
        self._stale: set[str] = set()
        """Paths of whose former files vLLM's own cache may have KV: it takes name and path for the adapter."""
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake-connector-adapter")

    def load(self, request: LoRARequest, signature: Signature | None = None) -> bool:
        """The engine loads an adapter unless it has it. Whether that takes another one's place.

        `signature`: of its files before it was loaded; None where that is yet to come.
        """
        path, former = request.lora_path, self._adapters.get(request.lora_int_id)
        if former is not None and not request.load_inplace:
            return False
        signature = signature or adapter_signature(request)
        if signature is None or (former is not None and former.signature == signature):
            return False
        if self._signatures.get(path, signature) != signature:
            self._stale.add(path)
        self._signatures[path] = signature
        digest = self._hasher.submit(_digest, path, signature)
        self._adapters[request.lora_int_id] = _Adapter(signature, digest)
        wait([digest], _FIRST_WAIT_S)
        return former is not None

    def key(self, request: LoRARequest) -> str | None:
        """Digest of the files of an adapter that was loaded, or None: not known yet, not readable, or changed since."""
        try:
            adapter = self._adapters.get(request.lora_int_id)
            if adapter is None:
                return None
            if adapter.signature != adapter_signature(request):
                raise ModelIdentityError(f"the files in {request.lora_path} are not those that were loaded")
            return adapter.digest.result(0.0)
        except NotYet:
            return None
        except (ModelIdentityError, OSError) as error:
            _log_not_cached(request, error)
            return None

    def is_stale(self, request: LoRARequest) -> bool:
        """Whether a hit in vLLM's own cache may be KV of former files."""
        return request.lora_path in self._stale

    def own_cache_emptied(self) -> None:
        """vLLM has forgotten all KV of its own."""
        self._stale.clear()

    def close(self) -> None:
        self._hasher.shutdown(wait=False, cancel_futures=True)


def _log_not_cached(request: LoRARequest, error: Exception) -> None:
    log_once(f"lora:{request.lora_path}", "requests with this adapter are not cached: %s", error, logger=logger)


def adapter_signature(request: LoRARequest) -> Signature | None:
    """Name, inode, size and time of every file of an adapter's folder; None where it cannot be read."""
    try:
        return _signature(request.lora_path)
    except OSError as error:
        _log_not_cached(request, error)
        return None


def _signature(path: str) -> Signature:
    with os.scandir(path) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats))


def _digest(path: str, signature: Signature) -> str:
    digest = files_digest(Path(path), LORA_FILES, cache_dir=default_cache_dir())
    if _signature(path) != signature:
        raise ModelIdentityError(f"the files in {path} changed while they were read")
    return digest
