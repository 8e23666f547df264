"""A connected stream socket as both of its ends use it."""

from __future__ import annotations

import socket
import struct
import time
from array import array
from collections.abc import Callable

from transfer.transports.vectors import MSG_DONTWAIT, Small, Vector, send_small

_MANY_NBYTES = 1 << 20
_WAIT_TIMEVAL = struct.pack("ll", 0, 20000)
"""20 ms, as the kernel's timeval: how long a call waits for more bytes, or for room."""
_LATE_S = 0.003
"""A call that does not wait takes less by itself, whatever the socket holds."""
_WAITING_CALLS = 32
"""Until it is looked again whether they need to."""


class Channel:
    """Until `hurry` its calls wait, as long as `settimeout` says; from then on they raise BlockingIOError.

    Few bytes move without releasing the interpreter lock. Beside a busy Python thread a call that releases it comes
    back 5 ms late, whatever it moved: less than a MiB, as much as a socket holds. Where that is seen, the next calls
    that have much to move wait in the kernel for more of it, for 20 ms at most.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        self.settimeout = connection.settimeout
        self.version = 0
        """That both ends speak, at the end that connects, once they have shaken hands."""
        self._waiting_calls = 0
        self._flags = 0

    def hurry(self) -> None:
        """From now on no call waits, but those that the class tells of."""
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, _WAIT_TIMEVAL)
        self.socket.settimeout(None)  # the file itself may wait: each call says that it does not
        self._flags = MSG_DONTWAIT

    def why(self, error: Exception) -> Exception:
        """What the connection failed of, where more is known than `error`, which a call on it raised."""
        return error

    def close(self) -> None:
        self.socket.close()

    def recv(self, nbytes: int) -> bytes:
        """b"" at the end, as for all that receive. Raises OSError, as all do."""
        return self.socket.recv(nbytes, self._flags)

    def sendall(self, data: bytes | array[int]) -> None:
        self.socket.sendall(data)

    def send(self, data: bytes) -> int:
        """Send what is taken now."""
        return send_small(self.descriptor, data)

    def send_vector(self, vector: Vector) -> int:
        """Send what is taken now."""
        return self._at_length(vector.send, vector.left)

    def fill(self, small: Small, start: int = 0) -> int:
        """Fill from `start` on with what has arrived; 0 at the end."""
        return small.receive(self.descriptor, start)

    def fill_vector(self, vector: Vector) -> int:
        """Fill with what has arrived; 0 at the end."""
        return self._at_length(vector.receive, vector.left)

    @property
    def waits(self) -> bool:
        """Whether calls that have much to move do, at present."""
        return self._waiting_calls > 0

    def _at_length(self, call: Callable[..., int], nbytes: int) -> int:
        if nbytes < _MANY_NBYTES:
            return call(self.descriptor)
        if self._waiting_calls:
            self._waiting_calls -= 1
            return call(self.descriptor, waits=True)
        began_s = time.monotonic()
        try:
            return call(self.descriptor)
        finally:
            if time.monotonic() - began_s > _LATE_S:
                self._waiting_calls = _WAITING_CALLS
