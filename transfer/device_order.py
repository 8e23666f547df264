"""What may only be said of the engine's blocks once its device has done the work that it was given before.

The engine's thread launches kernels and goes on; a layer is computed when its kernels are over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mooncake_connector.log import get_logger, log_once

logger = get_logger(__name__)

Wait = Callable[[], None]
_STOP_S = 5.0


class DeviceOrder:
    """Calls in their order, each when the device has done what was queued before it; at once where there is none.

    A device that failed makes no call any more: transfers end at their deadlines.
    """

    def __init__(self, record: Callable[[], Wait | None]) -> None:
        self._record = record
        self._waiting: queue.SimpleQueue[tuple[Wait, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def then(self, call: Callable[[], None], wait: Wait | None = None) -> None:
        """Make `call`, which must return at once, after `wait` where the caller knows better what there is to wait for.
        """
        wait = wait or self._record()
        if wait is None:
            call()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mooncake-connector-device", daemon=True)
            self._thread.start()
        self._waiting.put((wait, call))

    def close(self) -> None:
        """Make no call after those that wait now."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            wait, call = waiting
            try:
                wait()
                call()
            except Exception as error:
                log_once("pd.device", "KV in device memory cannot be sent or fetched: %r", error, logger=logger)
