"""What names the weights of this process once they are not those of the model's files any more.

All ranks of a server are updated alike and empty their caches alike, each by itself. So they agree on a name without
asking: that of this run of the server, how often weights changed in it, and whether the caches were emptied since. So
latent KV (MLA) that one rank stores is found by the others.
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace
from functools import lru_cache

import torch.distributed
from torch.distributed.distributed_c10d import _get_default_store

from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace, private_model_digest
from mooncake_connector.log import get_logger
from mooncake_connector.threads import apart

_KEY = "mooncake-connector: this run of the server"
_ASK_S = 2.0
"""How long the ranks' common store is asked; then this process has a name of its own, and finds nothing of others."""

logger = get_logger(__name__)


class MemoryWeights:
    """It is the process whose weights change, so it also holds for a backend that is attached, or knows its namespace,
    later."""

    def __init__(self) -> None:
        self._run = ""
        self._changes = 0
        self._digest = ""
        """In place of that of the files, once the weights changed. Other threads read it: it is replaced at once."""

    def changed(self) -> None:
        """The weights in memory are no longer those of the files, or of the last change."""
        self._run = self._run or _ask_run() or private_model_digest()
        self._changes += 1
        self._digest = private_model_digest(f"{self._run} {self._changes} and caches of before")
        logger.info("the weights changed in memory: pages are not shared with other instances from now on")

    def caches_emptied(self) -> None:
        """SGLang's own caches are empty: what was stored from them since the weights changed has no name any more.

        An update is often made while requests run or their pages are on the way to the pool; SGLang flushes its caches
        later then, when all of these have ended.
        """
        if self._changes:
            self._digest = private_model_digest(f"{self._run} {self._changes}")

    @property
    def are_of_files(self) -> bool:
        """Whether they are those that were loaded, as far as is known."""
        return not self._digest

    def of(self, namespace: Namespace) -> Namespace:
        """`namespace`, which speaks of the model's files, or what stands for it once the weights in memory changed."""
        digest = self._digest
        return _renamed(namespace, digest) if digest else namespace


@lru_cache(maxsize=1)
def _renamed(namespace: Namespace, model_digest: str) -> Namespace:
    return replace(namespace, model_digest=model_digest)


def _ask_run() -> str:
    """What the ranks of this server have in common and no other server, nor this one after a restart, has; empty where
    they have no store in common, or it does not answer."""
    if not torch.distributed.is_initialized():
        return ""
    asked = apart(contained(nothing)(lambda: _get_default_store().compare_set(_KEY, "", private_model_digest())))
    return (asked.result() or b"").decode() if wait([asked], _ASK_S).done else ""


in_memory = MemoryWeights()
