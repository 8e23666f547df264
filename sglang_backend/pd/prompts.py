"""The digest of a request's prompt, by which both sides tell requests of one room apart.

SGLang tells neither a sender nor a receiver which tokens its KV is of, but it makes each in one call that has the
request: during that call the request is at hand. Where these calls are not as they are known here, no prompt is
compared, and everything else works.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_connector.contain import contained
from sglang_backend.targets import Target

_at_hand = threading.local()


def current() -> bytes:
    """Of the request that this thread makes a sender or a receiver for; empty where nothing is known of it."""
    req = current_request()
    return b"" if req is None else digest(req)


def current_request() -> Any:
    """SGLang's request that this thread makes a sender or a receiver for; None where that is not known."""
    return getattr(_at_hand, "req", None)


def computed_ids(req: Any) -> np.ndarray:
    """The tokens that prefill computes for a request: its prompt, and after `pause_generation` in mode `retract` what
    was generated."""
    ids = np.asarray(req.origin_input_ids, dtype="<i8")
    if getattr(req, "pd_rebootstrap_in_progress", False):
        ids = np.concatenate([ids, np.asarray(req.output_ids, dtype="<i8")])
    return ids


@contained(bytes)
def digest(req: Any) -> bytes:
    """Of the tokens that prefill computes for a request; empty where these are not all that its KV depends on.

    Images are in the tokens by numbers that each instance may choose. Adapters, whose names are each instance's own,
    and salts are not compared.
    """
    if req.multimodal_inputs is not None or req.input_embeds is not None or req.positional_embed_overrides is not None:
        return b""
    return hashlib.blake2b(computed_ids(req).tobytes(), digest_size=32).digest()


def telling(make: Callable[..., Any], queue: Any, req: Any, *args: Any, **more: Any) -> Any:
    """A hook around the call that makes a request's sender or receiver."""
    _at_hand.req = req
    try:
        return make(queue, req, *args, **more)
    finally:
        _at_hand.req = None


_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"

TARGETS = (
    Target(f"{_PREFILL}.create_sender", ("self", "req", "num_kv_heads"), telling, names=("disagg_kv_sender",)),
    Target(
        f"{_DECODE}._create_receiver_and_enqueue",
        ("self", "req", "is_rebootstrap"),
        telling,
        names=("bootstrap_room",),
    ),
    Target(f"{_DECODE}._rebootstrap_prefill_len", ("req",), names=("origin_input_ids", "output_ids")),
    Target(f"{_REQUEST}.build_rebootstrap_payload", ("self",), names=("origin_input_ids", "output_ids")),
)
