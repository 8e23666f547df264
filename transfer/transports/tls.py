"""TLS below the tcp transport: the same streams, encrypted, with certificates on both sides.

Each side must show a certificate of the deployment's own authority; names in certificates are not looked at, since
peers are known by address. The handshake of the shared secret runs inside as ever.

A process of its own does it (`tls_relay.py`), one for each process that uses TLS: Python's `ssl` moves one record a
call, and a call that needs the interpreter lock beside a busy Python thread waits 5 ms for it. What is said to that
process over a Unix socket goes out over the TCP socket that it was handed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakSet

from mooncake_connector.log import get_logger, log_once
from transfer.transports import tls_relay
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.channel import Channel

logger = get_logger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_WELL_S = 60.0
"""A process that lasted so long is started anew at once when it has ended."""
_ENDED = "the process that does TLS on this side has ended"
_VARIABLES = ("LD_LIBRARY_PATH", "OPENSSL_CONF", "OPENSSL_MODULES")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: this process's certificate and key, and the authority that signs those of all peers."""

    certificate: str
    key: str
    authority: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Raises TransferError for files that cannot be used."""
        try:
            return tls_relay.make_context(self.certificate, self.key, self.authority, server=server)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"TLS files {self.certificate}, {self.key}, {self.authority} cannot be used: {error}"
            ) from error

    def absolute(self) -> Tls:
        """The same files, wherever this process may go; the one that reads them has another directory."""
        return Tls(*map(os.path.abspath, (self.certificate, self.key, self.authority)))

    def secure(self, connection: socket.socket, *, server: bool) -> Channel:
        """A channel over this TCP connection, which is closed here and goes on in the process that does TLS.

        The paths must be absolute. TLS's own handshake is under way then: where it fails, the channel ends. Raises
        Unavailable, OSError.
        """
        return _process.take(connection, [self.certificate, self.key, self.authority], server)


class SecuredChannel(Channel):
    """The engine's end."""

    def __init__(self, near: socket.socket, number: int, process: TlsProcess) -> None:
        super().__init__(near)
        self._number, self._process = number, process

    def why(self, error: Exception) -> Exception:
        return (self._process.said_of(self._number) or error) if isinstance(error, ConnectionError) else error

    def close(self) -> None:
        self._process.forget(self._number)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # a forked child may have a copy
        super().close()


class TlsProcess:
    """The process that does TLS for this one, from the first need of it until its last user and connection are closed.
    Safe to use from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        """A forked child counts on: connections of the parent's, which it may close, are none of its own."""
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._users = WeakSet[object]()
        self._open: dict[int, OSError | None] = {}
        """Connections by number, with what was said of their end."""
        self._ended = ""
        """How the last one ended."""
        self._pause_s = self._not_before = 0.0
        self._ends: Counter[str] = Counter()

    def hold(self, user: object) -> None:
        """See `hold_tls`."""
        with self._lock:
            self._users.add(user)

    def release(self, user: object) -> None:
        """See `release_tls`."""
        with self._lock:
            self._users.discard(user)
            self._end_unused()

    def start(self) -> None:
        """See `start_tls`."""
        with self._lock:
            self._running()

    def take(self, connection: socket.socket, files: list[str], server: bool) -> SecuredChannel:
        """See `Tls.secure`."""
        with self._lock:  # a child that is forked meanwhile would keep the other end open
            near, far = socket.socketpair()
            try:
                near.settimeout(connection.gettimeout())
                number = next(self._numbers)
                self._hand_over(json.dumps([number, server, files]).encode(), [far.fileno(), connection.fileno()])
            except BaseException:
                near.close()
                raise
            finally:
                far.close()
            self._open[number] = None
        connection.close()
        return SecuredChannel(near, number, self)

    def said_of(self, number: int) -> OSError | None:
        """Why this connection ended, where that was told; it is told before the end is seen."""
        with self._lock:
            self._listen()
            return self._open.get(number)

    def forget(self, number: int) -> None:
        """It is closed."""
        with self._lock:
            self._listen()  # what is said of closed ones must not fill the socket
            self._open.pop(number, None)
            self._end_unused()

    def take_ends(self) -> Mapping[str, int]:
        """See `take_ends_of_tls`."""
        if not self._lock.acquire(blocking=False):  # somebody starts the process, which takes its time
            return {}
        try:
            ends, self._ends = self._ends, Counter()
            return ends
        finally:
            self._lock.release()

    def _end_unused(self) -> None:
        if not self._users and not self._open:
            self._drop()

    def _hand_over(self, order: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._running(), [order], descriptors)
        except BlockingIOError:
            raise Unavailable("the process that does TLS takes nothing more") from None
        except (BrokenPipeError, ConnectionResetError):  # the thread that waits for its end does not know yet
            self._drop()
            socket.send_fds(self._running(), [order], descriptors)

    def _running(self) -> socket.socket:
        if self._control is None:
            left_s = self._not_before - time.monotonic()
            if left_s > 0:
                raise Unavailable(f"the process that does TLS {self._ended}; it is started again in {left_s:.1f} s")
            if not sys.executable:
                raise Unavailable("no Python executable is known (sys.executable) to start the process that does TLS")
            try:
                self._control = self._begin()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                raise Unavailable(f"the process that does TLS cannot be started: {error}") from error
        return self._control

    def _begin(self) -> socket.socket:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said = -1
        try:
            here.setblocking(False)
            said = os.memfd_create("mooncake-tls")
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", tls_relay.__file__],
                stdin=there.fileno(), stdout=said, stderr=said, cwd="/", start_new_session=True,
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            )  # fmt: skip
            watch = threading.Thread(
                target=self._watch, args=(process, here, said), name="mooncake-tls-process", daemon=True
            )
            watch.start()  # where there is no thread for it the process ends with `here`
        except BaseException:
            here.close()
            if said >= 0:
                os.close(said)
            raise
        finally:
            there.close()
        return here

    def _watch(self, process: subprocess.Popen[bytes], control: socket.socket, said: int) -> None:
        began_s = time.monotonic()
        status = process.wait()
        with os.fdopen(said, "rb") as file:
            file.seek(0)
            last = (file.read(1 << 16).decode(errors="replace").strip().splitlines() or [""])[-1]
        with self._lock:
            if status == 0 and self._control is not control:  # it was let go
                return
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._ends[how] += 1
            ended = self._ended = f"ended ({how}{last and ': ' + last})"
            lasted = time.monotonic() - began_s > _WELL_S
            self._not_before = 0.0 if lasted else time.monotonic() + self._pause_s
            self._pause_s = 0.0 if lasted else min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            if self._control is control:
                self._drop()
        log_once(
            "transfer.tls_process", "the process that does TLS %s: all connections with TLS are lost; the next one "
            "starts another", ended, logger=logger,
        )  # fmt: skip

    def _drop(self) -> None:
        self._listen()
        if self._control is not None:
            self._control.close()
            self._control = None

    def _listen(self) -> None:
        """Take what it has said by now."""
        while self._control is not None:
            try:
                said = self._control.recv(tls_relay.SAID_NBYTES)
            except BlockingIOError:
                return
            except OSError:  # it had not read all that it was told
                said = b""
            if not said:  # this may come after the ends of the connections, whose reason nobody knows then
                for number, known in self._open.items():
                    self._open[number] = known or ConnectionResetError(errno.ECONNRESET, _ENDED)
                return
            number, kind, code, text = json.loads(said)
            if number in self._open:
                self._open[number] = getattr(ssl, kind, OSError)(code, text)

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The child has another one, when it needs it; the parent's has to see when the parent ends."""
        if self._control is not None:
            self._control.close()
        self._reset()


_process = TlsProcess()
os.register_at_fork(
    before=lambda: _process.before_fork(),
    after_in_parent=lambda: _process.after_fork_in_parent(),
    after_in_child=lambda: _process.after_fork_in_child(),
)


def hold_tls(user: object) -> None:
    """From now on the process that does TLS stays, once it is there, until each user has released it."""
    _process.hold(user)


def release_tls(user: object) -> None:
    """This user is through with it, and its connections are closed."""
    _process.release(user)


def start_tls() -> None:
    """Start the process that does TLS where it is not there. Raises Unavailable."""
    _process.start()


def take_ends_of_tls() -> Mapping[str, int]:
    """How often it ended by itself since the last call, by its signal or exit status. Waits for nothing: an engine asks
    in each of its steps."""
    return _process.take_ends()
