"""What may only be said of the engine's blocks once its device has done the work that it was given before.

The engine's thread launches kernels and goes on; a layer is computed when its kernels are over.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

from mooncake_connector.log import get_logger, log_once
from mooncake_connector.threads import DaemonThreads

logger = get_logger(__name__)

Wait = Callable[[], None]
_STOP_S = 5.0


class DeviceOrder:
    """Calls in their order, each when the device has done what was queued before it; at once where there is none.

    A device that failed makes no call any more: transfers end at their deadlines.
    """

    def __init__(self, record: Callable[[], Wait | None]) -> None:
        self._record = record
        self._thread = DaemonThreads(1, "mooncake-connector-device")
        self._last: list[Future[None]] = []

    def then(self, call: Callable[[], None], wait: Wait | None = None) -> None:
        """Make `call`, which must return at once, after `wait` where the caller knows better what there is to wait for.
        """
        wait = wait or self._record()
        if wait is None:
            call()
            return
        try:
            self._last = [self._thread.submit(_wait_and_call, wait, call)]
        except RuntimeError as error:  # it is closed, or no thread can be started
            _say(error)

    def close(self) -> None:
        """Make no call after those that wait now."""
        self._thread.shutdown(wait=False)
        wait_for(self._last, _STOP_S)


def _wait_and_call(wait: Wait, call: Callable[[], None]) -> None:
    try:
        wait()
        call()
    except Exception as error:
        _say(error)


def _say(error: Exception) -> None:
    log_once("pd.device", "KV in device memory cannot be sent or fetched: %r", error, logger=logger)
