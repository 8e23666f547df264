"""The process that does TLS: between plain bytes of the process that started it and a network.

`python -I -S tls_relay.py`, standard library only. Standard input is the control socket, by which connections are
handed over: a datagram each, with a Unix socket and a TCP socket. What is said on the one goes out encrypted on the
other, and back. How a connection ended, where that was not by its end, is answered before the Unix socket is closed.
The process ends when the control socket does.

A connection has a thread, in which all of its TLS is done: at most `CHUNK_NBYTES` are under way to the network, and
`MAX_WAITING` times as much to the engine, plain and encrypted; each way goes on while the other one waits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import socket
import ssl
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence

CHUNK_NBYTES = 128 << 10
"""Read at a time, from either side."""
MAX_WAITING = 32
"""Readings from the wire that wait for the engine, which beside a busy Python thread comes back 5 ms late."""
MAX_WAITING_OF_ALL = 512
"""Of all connections together; while there are so many, one has to be over before a connection takes the next."""
MAX_CONNECTIONS = 1024
"""Of which an engine has at most some hundred; the rest are those that it closed, on their way out."""
MAX_LEAVING = 128
"""Of those; the oldest are cut off for newcomers, whom peers that never close would keep out otherwise."""
FAREWELL_S = 5.0
"""For what was sent before the engine closed a connection, and for the peer to close it as well."""
LEAVE_S = 0.8
"""The same once the engine is gone."""
SSL_KINDS = ("SSLCertVerificationError", "SSLError")
"""What is told of a failure of TLS besides its words; of others their number."""
SAID_NBYTES = 16 << 10
"""Of a datagram on the control socket that answers: `_SAID_LENGTH` characters of any path take up to 12 bytes each."""
ORDER_NBYTES = 128 << 10
"""Of one that hands over: three paths, of which a byte may take 6."""

_SAID_LENGTH = 1000
_RECORD_NBYTES = 16 << 10
_MAX_UNSENT_NBYTES = 1 << 20
"""Beyond what was read at once: a peer that asks for new keys all the time, and reads no answer."""
_STACK_NBYTES = 512 << 10
_GONE = select.POLLHUP | select.POLLERR | select.POLLNVAL


def make_context(certificate: str, key: str, authority: str, *, server: bool) -> ssl.SSLContext:
    """Of one side. Raises OSError or ValueError for files that cannot be used."""
    for path in (certificate, key, authority):
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe waits for who writes to it
            raise ValueError(f"{path} is no regular file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key, password="")  # or it asks for one, of standard input
    context.load_verify_locations(authority)
    return context


class Backlog:
    """How many readings wait for the engine, of all its connections. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, more: int) -> None:
        with self._lock:
            self.count += more


class Relayed:
    """One connection; see the module."""

    def __init__(
        self, plain: socket.socket, wire: socket.socket, context: ssl.SSLContext, backlog: Backlog, *, server: bool
    ) -> None:
        self._plain, self._wire, self._backlog = plain, wire, backlog
        self._num_counted = 0
        """In the backlog."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._cipher = memoryview(b"")
        self._clear: deque[memoryview] = deque()
        """What the wire, and the engine, have not taken yet."""
        self._room = memoryview(b"")
        """For what comes out of one reading, and of the record that the one before had only a part of; made when the
        peer is known."""
        self._is_left = self._is_ended = False
        """Whether the engine has closed, or the peer."""
        self._broken: OSError | None = None
        """Why nothing can be sent any more; what the peer said before is still read."""
        self._failure: OSError | None = None
        self._over_at = float("inf")
        self._poller = select.poll()
        self._watched: dict[socket.socket, int] = {}
        self._gone: set[socket.socket] = set()
        """Sockets with nobody at their other end: no call on them waits, and polling would show that all the time."""

    def run(self) -> None:
        """Until both sides have ended, or the engine has and its peer takes too long. Raises OSError."""
        for end in (self._plain, self._wire):
            end.setblocking(False)
            self._poller.register(end, 0)
            self._watched[end] = 0
        self._advance()
        while not (self._is_left and self._is_ended and not self._cipher) and time.monotonic() < self._over_at:
            self._turn()
            if self._failure is not None and not self._clear:
                raise self._failure

    @property
    def leaves_by(self) -> float:
        """Until when it goes on, in `time.monotonic()` seconds, once the engine has closed; infinity before."""
        return self._over_at

    def cut_off(self) -> None:
        """End it now. For any thread; the wire's end wakes its own."""
        self._over_at = 0.0
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Both sockets, after what TLS has to say of a failure."""
        with contextlib.suppress(OSError):
            self._wire.send(self._cipher)
        self._plain.close()
        self._wire.close()
        self._backlog.add(-self._num_counted)

    def _turn(self) -> None:
        at_plain, at_wire = self._ready()
        if at_plain & select.POLLIN:
            self._take_plain()
        if self._cipher:
            self._send()
        if at_wire & select.POLLIN:
            self._take_wire()
        if self._clear:
            self._give()
        if more := len(self._clear) - self._num_counted:
            self._backlog.add(more)
            self._num_counted += more

    def _ready(self) -> tuple[int, int]:
        is_whole = self._broken is None and self._failure is None
        takes_plain = bool(self._room) and is_whole and not self._cipher and not self._is_left
        most = MAX_WAITING if self._backlog.count < MAX_WAITING_OF_ALL else 1
        takes_wire = len(self._clear) < most and not self._is_ended
        wanted = {
            self._plain: takes_plain * select.POLLIN | (len(self._clear) > 0) * select.POLLOUT,
            self._wire: takes_wire * select.POLLIN | (len(self._cipher) > 0) * select.POLLOUT,
        }
        is_idle = True
        for end, events in wanted.items():
            if end in self._gone:
                is_idle = is_idle and not events
            elif self._watched[end] != events:
                self._poller.modify(end, events)
                self._watched[end] = events
        left_s = min(self._over_at - time.monotonic(), 3600.0)
        found = dict(self._poller.poll(max(0.0, left_s) * 1000 if is_idle else 0))
        for end in (self._plain, self._wire):
            if found.get(end.fileno(), 0) & _GONE:
                self._poller.unregister(end)
                self._gone.add(end)
                if end is self._plain:
                    self._be_left()
        return tuple(  # type: ignore[return-value]
            events if end in self._gone else found.get(end.fileno(), 0) for end, events in wanted.items()
        )

    def _be_left(self) -> None:
        """The engine has closed; what it had said before is still there."""
        if not self._room:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the engine has given it up")
        self._over_at = time.monotonic() + FAREWELL_S

    def _take_plain(self) -> None:
        try:
            data = memoryview(self._plain.recv(CHUNK_NBYTES))
        except BlockingIOError:
            return
        except ConnectionError:  # it has closed with something unread
            data = memoryview(b"")
        if not data:
            self._is_left = True
            self._over_at = min(self._over_at, time.monotonic() + FAREWELL_S)
            with contextlib.suppress(ssl.SSLError):  # nobody waits for the other side's
                self._tls.unwrap()
        at = 0
        while at < len(data):
            at += self._tls.write(data[at:])  # a record at a time
        self._collect()

    def _take_wire(self) -> None:
        try:
            data = self._wire.recv(CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        if self._is_left:
            self._is_ended = not data
            return
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        self._advance()

    def _advance(self) -> None:
        """Do what the bytes that have come allow."""
        at = 0
        try:
            if not self._room:
                self._tls.do_handshake()
            if not self._room or self._clear:  # what waits lies in the former one
                self._room = memoryview(bytearray(CHUNK_NBYTES + 2 * _RECORD_NBYTES))
            while taken := self._tls.read(_RECORD_NBYTES, self._room[at:]):
                at += taken  # type: ignore[operator]  # a number, since there is a buffer
            self._is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLEOFError:
            cut_off = ConnectionResetError(errno.ECONNRESET, "cut off: the connection ended, and TLS did not")
            self._fail(self._broken or cut_off)
        except OSError as error:
            self._fail(error)
        if at:
            self._clear.append(self._room[:at])
        self._collect()
        self._end_plain()

    def _fail(self, error: OSError) -> None:
        self._failure, self._is_ended = error, True

    def _collect(self) -> None:
        if self._outgoing.pending:
            self._cipher = memoryview(bytes(self._cipher) + self._outgoing.read())
            if len(self._cipher) > CHUNK_NBYTES + _MAX_UNSENT_NBYTES:
                raise OSError(errno.EPROTO, "the peer asks for more than it reads")

    def _send(self) -> None:
        try:
            self._cipher = self._cipher[self._wire.send(self._cipher) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._cipher, self._broken = memoryview(b""), error

    def _give(self) -> None:
        try:
            while self._clear:
                part = self._clear[0]
                rest = part[self._plain.send(part) :]
                if rest:
                    self._clear[0] = rest
                else:
                    self._clear.popleft()
        except BlockingIOError:
            return
        except OSError:  # it has closed
            self._clear.clear()
        self._end_plain()

    def _end_plain(self) -> None:
        """Once the peer says nothing more, and the engine has all of it. The engine may go on."""
        if self._is_ended and not self._clear and self._failure is None:
            with contextlib.suppress(OSError):
                self._plain.shutdown(socket.SHUT_WR)


class Relay:
    """All connections of one engine."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}
        self._threads: dict[threading.Thread, Relayed] = {}
        self._backlog = Backlog()

    def run(self) -> None:
        """Until the control socket ends."""
        while True:
            try:
                order, descriptors, _, _ = socket.recv_fds(self._control, ORDER_NBYTES, 2)
            except ConnectionResetError:  # it was closed with something of ours in it that was not read
                break
            if not order:
                break
            ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            number, is_server, files = json.loads(order)
            try:
                self._begin(number, ends, files, is_server)
            except Exception as error:  # also a defect of ours costs this connection only
                self._end(number, error, ends)
        until = time.monotonic() + LEAVE_S
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def _begin(self, number: int, ends: list[socket.socket], files: list[str], is_server: bool) -> None:
        if len(ends) != 2:
            raise OSError(errno.EMFILE, "no file descriptor is left to the process that does TLS")
        self._make_room()
        if len(self._threads) >= MAX_CONNECTIONS:
            raise OSError(errno.EUSERS, f"{MAX_CONNECTIONS} connections are open in the process that does TLS")
        plain, wire = ends
        which = (*files, str(is_server))
        if which not in self._contexts:
            self._contexts[which] = self._context(files, is_server)
        relayed = Relayed(plain, wire, self._contexts[which], self._backlog, server=is_server)
        thread = threading.Thread(target=self._relay, args=(number, relayed), daemon=True)
        self._threads[thread] = relayed
        try:
            thread.start()
        except RuntimeError:
            del self._threads[thread]
            raise

    def _make_room(self) -> None:
        leaving = [one for one in list(self._threads.values()) if one.leaves_by < float("inf")]
        leaving.sort(key=lambda one: one.leaves_by)
        for one in leaving[:-MAX_LEAVING]:
            one.cut_off()

    @staticmethod
    def _context(files: list[str], is_server: bool) -> ssl.SSLContext:
        try:
            return make_context(*files, server=is_server)
        except (OSError, ValueError) as error:
            raise OSError(errno.EINVAL, f"TLS files {', '.join(files)} cannot be used: {error}") from error

    def _relay(self, number: int, relayed: Relayed) -> None:
        error: Exception | None = None
        try:
            relayed.run()
        except Exception as found:
            error = found
        self._end(number, error, [relayed])
        del self._threads[threading.current_thread()]

    def _end(self, number: int, error: Exception | None, ends: Sequence[socket.socket | Relayed]) -> None:
        """Say why before the engine sees that it ended."""
        if error is not None:
            kind = next((name for name in SSL_KINDS if isinstance(error, getattr(ssl, name))), "OSError")
            text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            said = json.dumps([number, kind, getattr(error, "errno", None) or errno.EIO, text[:_SAID_LENGTH]])
            with contextlib.suppress(OSError):  # nobody is there any more
                self._control.send(said.encode(), socket.MSG_DONTWAIT)
        for end in ends:
            end.close()


def main() -> None:
    """See the module."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(_STACK_NBYTES)
    Relay(socket.socket(fileno=0)).run()
    os._exit(0)  # threads that are still at it end with it


if __name__ == "__main__":
    main()
