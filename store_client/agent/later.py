"""A tier that is opened in a thread, and again until it opens: an agent is there at once, whatever its tiers do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.base import Bytes, Put
from store_client.tiers.base import Purged, Sealed, SpaceName, Target, Tier, TierError, TierStats

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_CLOSE_S = 5.0

logger = get_logger(__name__)


class LaterTier(Tier):
    """The tier that `open` returns once it does; before, every call raises the TierError that `open` raised last."""

    def __init__(self, title: str, open: Callable[[], Tier]) -> None:
        self._title, self._open = title, open
        self._tier: Tier | None = None
        self._why = TierError(f"tier {title} is being opened", "unavailable")
        self._memory: Bytes | None = None
        self._registering = threading.Lock()
        self._closed, self._tried = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mooncake-connector-{title}", daemon=True)
        self._thread.start()

    def register(self, memory: Bytes) -> None:
        with self._registering:
            self._memory = memory
            if self._tier is not None:
                self._tier.register(memory)

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        return self._now().contains(space, keys, nbytes=nbytes, deadline_s=deadline_s)

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        return self._now().read(space, targets, nbytes=nbytes, deadline_s=deadline_s)

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        return self._now().write(space, pages, nbytes=nbytes, deadline_s=deadline_s)

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        return self._now().remove(space, keys, deadline_s=deadline_s)

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        return self._now().clear(namespace, deadline_s=deadline_s)

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        return self._now().shards(namespace, deadline_s=deadline_s)

    def purge(
        self,
        namespace: bytes | None,
        *,
        older_than_s: float | None = None,
        larger_than_nbytes: int | None = None,
        deadline_s: float,
    ) -> Purged:
        return self._now().purge(
            namespace, older_than_s=older_than_s, larger_than_nbytes=larger_than_nbytes, deadline_s=deadline_s
        )

    def stats(self) -> TierStats:
        tier = self._tier
        return TierStats(notes={"not open": str(self._why)}) if tier is None else tier.stats()

    def tidy(self, deadline_s: float) -> None:
        self._now().tidy(deadline_s)

    def wait(self, timeout_s: float) -> None:
        """Until the first attempt to open it has ended."""
        self._tried.wait(timeout_s)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_S)
        if self._tier is not None:
            self._tier.close()

    def _now(self) -> Tier:
        if self._tier is None:
            raise TierError(str(self._why), self._why.cause)  # not lasting: it is tried again here
        return self._tier

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                tier = self._open()
                with self._registering:
                    if self._memory is not None:
                        tier.register(self._memory)
                    self.batch_nbytes, self.parallel, self.needs_mac = tier.batch_nbytes, tier.parallel, tier.needs_mac
                    self._tier = tier
                self._tried.set()
                logger.info("tier %s is open", self._title)
                if self._closed.is_set():
                    tier.close()
                return
            except Exception as error:
                self._why = error if isinstance(error, TierError) else TierError(repr(error))
                said = "tier %s is not used: %s (tried again in up to %d s)"
                log_once(
                    f"tier.open:{self._title}:{kind_of(str(error))}", said, self._title, error, _LONGEST_PAUSE_S,
                    logger=logger,
                )  # fmt: skip
            self._tried.set()
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
