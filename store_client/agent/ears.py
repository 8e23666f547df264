"""What the agent says, read by whoever looks pages up: no thread is woken for a word, and nobody has to wait for one.

Reading keeps the interpreter lock, unlike the calls of `socket`, which give it away: beside a busy thread it would come
back only after 5 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import threading

from store_client.agent import messages
from store_client.agent.messages import Frames

_AT_ONCE_NBYTES = 4096
_WAIT_MS = 1
_AT_ONCE = int(socket.MSG_DONTWAIT)

_recv = ctypes.PyDLL(None).recv
_recv.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_recv.restype = ctypes.c_ssize_t


class Ears:
    """Of one connection. From any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._fd = connection, connection.fileno()
        self._frames = Frames()
        self._buffer = ctypes.create_string_buffer(_AT_ONCE_NBYTES)
        self._address, self._view = ctypes.addressof(self._buffer), memoryview(self._buffer).cast("B")
        self._reading = threading.Lock()

    def words(self) -> list[messages.Outbound]:
        """What has come by now; nothing where another thread reads. Raises Junk. That the connection is lost is not
        noticed here (`until_lost`)."""
        words: list[messages.Outbound] = []
        if not self._reading.acquire(blocking=False):
            return words
        try:
            nbytes = _AT_ONCE_NBYTES
            while nbytes == _AT_ONCE_NBYTES and self._fd >= 0:
                nbytes = _recv(self._fd, self._address, _AT_ONCE_NBYTES, _AT_ONCE)
                if nbytes <= 0:
                    break
                self._frames.feed(self._view[:nbytes])
                while (body := self._frames.take()) is not None:
                    words.append(messages.read_outbound(body))
        finally:
            self._reading.release()
        return words

    def wait(self) -> None:
        """Until there is a word to be read, but no longer than a millisecond. Gives the interpreter lock away."""
        if (fd := self._fd) >= 0:  # closed in between it may be another file's number, which costs that millisecond
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(_WAIT_MS)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Before the connection is closed: its number may be another file's at once."""
        with self._reading:
            self._fd = -1


def until_lost(connection: socket.socket) -> None:
    """Wait until either end hangs up. Words that come meanwhile wake nobody."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
