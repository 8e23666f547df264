"""`kv_transfer_params` of a request: what routers and proxies tell a prefill and a decode instance about each other.

The keys are NixlConnector's, so that routers which copy the prefill instance's answer to the decode instance serve us
unchanged; `transfer_id` is ours (and MooncakeConnector's). It names the transfer: the prefill instance makes one and
returns it, or a proxy that sends both requests at once puts the same into both. Bad or missing values never fail a
request: it is then prefilled where it is.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from transfer.protocol.incoming import Where
from transfer.protocol.messages import MAX_NAME_LENGTH

_MAX_TRANSFER_ID = 200

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """This instance computes the KV, another one goes on with it."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Another instance computes the KV, or has.

    Args:
        computed: the request was there first, and this is its answer.
        name: what that instance calls the transfer; "" where it did not say. Good for giving it up, and nothing else.
    """

    transfer_id: str
    where: Where
    computed: bool
    name: str = ""


class _Unusable(Exception):
    """A value, by its key, that is missing or cannot be."""


def parse_params(params: Mapping[str, Any] | None) -> PrefillRequest | DecodeRequest | None:
    """What a request is asked for here; None for an ordinary one, and for parameters that mean nothing here."""
    if not params:
        return None
    try:
        if params.get("do_remote_decode"):
            given = params.get("transfer_id")
            return PrefillRequest(uuid.uuid4().hex if given is None else _text(params, "transfer_id", _MAX_TRANSFER_ID))
        return _decode_request(params) if params.get("do_remote_prefill") else None
    except _Unusable as error:
        key = str(error)
        log_once(
            f"pd.params:{key}",
            "kv_transfer_params: %s=%.80r is missing or invalid; such requests are prefilled here",
            key,
            params.get(key),
            logger=logger,
        )
        return None


def _decode_request(params: Mapping[str, Any]) -> DecodeRequest:
    engine_id = "" if params.get("remote_engine_id") is None else _text(params, "remote_engine_id", 256)
    where = Where(_text(params, "remote_host", 64), _port(params), engine_id)
    computed = params.get("remote_request_id") is not None
    name = "" if params.get("transfer_name") is None else _text(params, "transfer_name", MAX_NAME_LENGTH)
    return DecodeRequest(_text(params, "transfer_id", _MAX_TRANSFER_ID), where, computed, name)


def _text(params: Mapping[str, Any], key: str, limit: int) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limit or not value.isprintable():
        raise _Unusable(key)  # JSON may have lone surrogates, which no message can
    return value


def _port(params: Mapping[str, Any]) -> int:
    value = params.get("remote_port")
    if isinstance(value, str) and value.isdecimal() and len(value) <= 5:  # some proxies keep it as text
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
        raise _Unusable("remote_port")
    return value


def answer_params(
    asked: PrefillRequest,
    *,
    name: str,
    request_id: str,
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
    engine_id: str,
    host: str,
    port: int,
    tp_size: int,
    pp_size: int,
) -> dict[str, Any]:
    """What the prefill instance answers, for the decode instance to be given verbatim."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "remote_num_tokens": num_tokens,
        "transfer_id": asked.transfer_id,
        "transfer_name": name,
    }


def transfer_name(
    transfer_id: str, namespace: Namespace, root: bytes, tokens: Sequence[int] | npt.NDArray[np.uint64]
) -> str:
    """What both sides call a transfer. Where prompt, weights or adapter differ, the names do, and nothing travels."""
    digest = hashlib.sha256(namespace.digest + len(root).to_bytes(4, "little") + root)
    digest.update(np.asarray(tokens, dtype="<u8").tobytes())
    return f"{transfer_id}:{digest.hexdigest()[:32]}"
