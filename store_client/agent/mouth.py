"""What the client says on a connection: by whoever says it, at once, where the other end has room for it.

So no thread is woken for a question, and none has to get hold of the interpreter lock first. Sending keeps that lock
for the same reason as reading does (`ears`).
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time

_SEND_S = 5.0
_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
"""A plain number: to put such flags together takes longer than to send."""

_send = ctypes.PyDLL(None).send
_send.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
_send.restype = ctypes.c_ssize_t


class Mouth:
    """Of one connection, and of who holds `turn`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._fd = connection, connection.fileno()
        self.turn = threading.Lock()
        self.closed = False
        self.unsent = b""
        """The rest of the last words, for which the other end had no room; before it is out nothing else is said."""

    def say_at_once(self, data: bytes) -> None:
        """As much of it as there is room for; nothing is unsent. Waits for nothing. That the connection is lost is
        noticed by others."""
        sent = _send(self._fd, data, len(data), _AT_ONCE)
        self.unsent = data[max(sent, 0) :]

    def say(self, data: bytes) -> None:
        """All of it. Raises OSError where the other end does not read for long."""
        give_up_s = time.monotonic() + _SEND_S
        view = memoryview(self.unsent + data)
        self.unsent = b""
        while view:
            try:
                view = view[self._connection.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"not within {_SEND_S:g} s") from None
                time.sleep(0.001)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
