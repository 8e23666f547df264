"""Many records of TLS in one call that lets go of the interpreter lock once.

Python's ssl module moves one record of 16 KiB a call, each of which costs 5 ms beside a busy Python thread. It alone
makes connections and verifies peers. Then its OpenSSL is called on what it made, through OpenSSL's BIO_f_buffer, which
goes on from record to record.
"""

from __future__ import annotations

import ctypes
import functools
import os
import ssl
import weakref
from typing import Any

from transfer.transports.vectors import SMALL_NBYTES

RECORD_NBYTES = 16 << 10
_POINTER_NBYTES = ctypes.sizeof(ctypes.c_void_p)
_BIO_C_SET_SSL, _BIO_NOCLOSE, _BIO_FLAGS_SHOULD_RETRY = 109, 0, 8
_SSL_ERROR_WANTS = (2, 3)
_END = b"unexpected eof while reading"
_SSL_CTRL_MODE, _SSL_MODE_ENABLE_PARTIAL_WRITE = 33, 1


class _OpenSsl:
    """The functions of the library that the ssl module is linked with.

    Raises ImportError, OSError or AttributeError where it cannot be reached, as when it is a part of Python itself.
    """

    def __init__(self) -> None:
        import _ssl

        self._kept, self._released = ctypes.PyDLL(_ssl.__file__), ctypes.CDLL(_ssl.__file__)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        version = self._function("OpenSSL_version", ctypes.c_char_p, number)(0)
        if version.decode() != ssl.OPENSSL_VERSION:
            raise OSError(f"found {version.decode()}, the ssl module has {ssl.OPENSSL_VERSION}")
        self._set = self._function("SSL_ctrl", ctypes.c_long, pointer, number, ctypes.c_long, pointer)
        self.descriptor = self._function("SSL_get_fd", number, pointer)
        self._keep_silent = self._function("SSL_set_quiet_shutdown", None, pointer, number)
        self.pending = self._function("SSL_pending", number, pointer)
        self.error = self._function("SSL_get_error", number, pointer, number)
        self.clear_errors = self._function("ERR_clear_error", None)
        self._last_error = self._function("ERR_peek_last_error", ctypes.c_ulong)
        self._reason = self._function("ERR_reason_error_string", ctypes.c_char_p, ctypes.c_ulong)
        self.has_flags = self._function("BIO_test_flags", number, pointer, number)
        self.free = self._function("BIO_free_all", None, pointer)
        self._new = self._function("BIO_new", pointer, pointer)
        self._kinds = [self._function(f"BIO_f_{kind}", pointer) for kind in ("buffer", "ssl")]
        self._control = self._function("BIO_ctrl", ctypes.c_long, pointer, number, ctypes.c_long, pointer)
        self._push = self._function("BIO_push", pointer, pointer, pointer)
        moving = number, pointer, pointer, number
        self.read, self.write = self._function("SSL_read", *moving), self._function("SSL_write", *moving)
        self.read_many, self.write_many = self._function("BIO_read", *moving), self._function("BIO_write", *moving)
        self.read_long = self._function("BIO_read", *moving, library=self._released)
        self.write_long = self._function("BIO_write", *moving, library=self._released)

    def _function(self, name: str, returned: Any, *arguments: Any, library: ctypes.CDLL | None = None) -> Any:
        function = getattr(library or self._kept, name)
        function.restype, function.argtypes = returned, arguments
        return function

    def prepare(self, connection: int) -> None:
        """Have writes say how much they took, and none be made when a chain is freed, as some versions do: another file
        may have the number of the socket by then."""
        self._set(connection, _SSL_CTRL_MODE, _SSL_MODE_ENABLE_PARTIAL_WRITE, None)
        self._keep_silent(connection, 1)

    def take_error(self) -> str:
        """What this thread's last call failed with, if the library says so; nothing at the end of a connection."""
        reason: bytes | None = self._reason(self._last_error())
        return "" if reason in (None, _END) else reason.decode()

    def chain(self, connection: int) -> int:
        """A BIO that moves many records of this SSL, to be freed."""
        buffer, within = (self._new(kind()) for kind in self._kinds)
        self._control(within, _BIO_C_SET_SSL, _BIO_NOCLOSE, connection)
        chain: int = self._push(buffer, within)
        return chain


@functools.cache
def _openssl() -> _OpenSsl | None:
    try:
        return _OpenSsl()
    except (ImportError, OSError, AttributeError):
        return None


class Records:
    """What moves on one connection, which must not wait by itself."""

    owed = 0
    """Of what was not taken by the last write, so much may be a record already that waits for room."""

    def __init__(self, openssl: _OpenSsl, pointer: int, connection: ssl.SSLSocket) -> None:
        self._openssl, self._ssl, self._descriptor = openssl, pointer, connection.fileno()
        openssl.prepare(pointer)
        self._chain = openssl.chain(pointer)
        made = connection._sslobj  # type: ignore[attr-defined]
        weakref.finalize(self, lambda chain, made: openssl.free(chain), self._chain, made).atexit = False

    @classmethod
    def of(cls, connection: ssl.SSLSocket) -> Records | None:
        """None where its OpenSSL cannot be reached."""
        openssl = _openssl()
        pointer = None if openssl is None else _pointer(connection)
        if openssl is None or pointer is None or openssl.descriptor(pointer) != connection.fileno():
            return None
        return cls(openssl, pointer, connection)

    @property
    def pending(self) -> bool:
        """Whether a record is read in part."""
        return self._openssl.pending(self._ssl) > 0

    def read(self, address: int, nbytes: int, *, waits: bool = False) -> int:
        """Fill from what is there now, or, if it `waits`, comes while calls on the socket do.

        Raises BlockingIOError where that is nothing, and SSLError. Returns 0 at the end and where the socket is of no
        use any more: the ssl module says which.
        """
        openssl = self._openssl
        openssl.clear_errors()
        if nbytes <= RECORD_NBYTES:  # the chain would keep what it reads of few bytes
            return self._moved(openssl.read(self._ssl, address, nbytes))
        return self._many((openssl.read_many, openssl.read_long), address, nbytes, waits)

    def write(self, address: int | bytes, nbytes: int, *, waits: bool = False) -> int:
        """Send what is taken, whole records as long as there are; as `read`. The next call has `owed` bytes or more."""
        openssl = self._openssl
        openssl.clear_errors()
        if nbytes >= RECORD_NBYTES:
            nbytes -= nbytes % RECORD_NBYTES  # the chain would keep the rest
        self.owed = min(nbytes, RECORD_NBYTES)
        if nbytes < RECORD_NBYTES:
            moved = self._moved(openssl.write(self._ssl, address, nbytes))
        else:
            moved = self._many((openssl.write_many, openssl.write_long), address, nbytes, waits)
        if moved == nbytes:
            self.owed = 0
        return moved

    def _many(self, calls: tuple[Any, Any], address: int | bytes, nbytes: int, waits: bool) -> int:
        call = calls[nbytes > SMALL_NBYTES]
        if waits:
            os.set_blocking(self._descriptor, True)
        try:
            moved: int = call(self._chain, address, nbytes)
        finally:
            if waits:
                os.set_blocking(self._descriptor, False)
        if moved <= 0 and self._openssl.has_flags(self._chain, _BIO_FLAGS_SHOULD_RETRY):
            raise BlockingIOError
        return self._or_none(moved)

    def _moved(self, moved: int) -> int:
        if moved <= 0 and self._openssl.error(self._ssl, moved) in _SSL_ERROR_WANTS:
            raise BlockingIOError
        return self._or_none(moved)

    def _or_none(self, moved: int) -> int:
        if moved > 0:
            return moved
        if error := self._openssl.take_error():
            raise ssl.SSLError(error)
        return 0


def _pointer(connection: ssl.SSLSocket) -> int | None:
    """Where the ssl module has OpenSSL's SSL of a connection: between two pointers that are known, or not at all."""
    made = connection._sslobj  # type: ignore[attr-defined]
    first = object.__basicsize__ // _POINTER_NBYTES
    if type(made).__basicsize__ < object.__basicsize__ + 3 * _POINTER_NBYTES:
        return None
    before, pointer, after = (ctypes.c_void_p * (first + 3)).from_address(id(made))[first:]
    is_there = before == id(weakref.ref(connection)) and after == id(connection.context)
    return pointer if is_there else None
