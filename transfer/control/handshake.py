"""Who is at the other end: mutual proof of a shared secret, the version to speak, and whether both sides fit together.

Sans-I/O: `Client` and `Server` take bytes and return bytes; `shake` drives a client over a blocking socket, `insist`
tries again where that was dropped. There are four frames, each a length (uint32, little endian) and a MessagePack map:

    client -> Hello      versions, nonce, instance, compatibility, purpose
    server -> Challenge  version, nonce, instance
    client -> Proof      HMAC-SHA256(secret, "client" || SHA256(Hello || Challenge))
    server -> Welcome    HMAC-SHA256(secret, "server" || SHA256(Hello || Challenge || Proof)), or a Refusal at any point

Nonces of both sides make a recorded handshake useless; the labels keep a proof from being sent back to its maker. The
bytes after the handshake are protected by the network or by TLS, not by this.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from transfer.transports.base import INSTANCE_NBYTES, TransferError, Unavailable

if TYPE_CHECKING:
    from transfer.transports.channel import Channel

OLDEST_VERSION = 7
VERSION = 10
MARKS_VERSION = 8
"""The first in which an introduction may say `marks`."""
LONG_ORDERS_VERSION = 9
"""The first in which an order of a transport on a library may be longer than a slot of staging."""
LONG_STREAMS_VERSION = 10
"""The first in which an order whose bytes follow it may have 128 MiB."""
MIN_SECRET_NBYTES = 16
MAX_FRAME_NBYTES = 1024
AGAIN_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses before further attempts where the other side hung up in the handshake, as one does that others crowd."""

_NONCE_NBYTES = 32
_Nonce = Annotated[bytes, Meta(min_length=_NONCE_NBYTES, max_length=_NONCE_NBYTES)]
_Instance = Annotated[bytes, Meta(min_length=INSTANCE_NBYTES, max_length=INSTANCE_NBYTES)]
_Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Version = Annotated[int, Meta(ge=0, le=65535)]


class HandshakeError(TransferError):
    """The other side is not who it should be, or does not fit. The message is fit for a log."""


class AnotherInstance(HandshakeError):
    """The process that was expected is not there any more."""


class Hello(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """First frame of a client; see the module."""

    oldest_version: _Version
    version: _Version
    nonce: _Nonce
    instance: _Instance
    compatibility: Annotated[bytes, Meta(max_length=64)]
    purpose: Annotated[str, Meta(max_length=32)]


class Challenge(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Answer to Hello."""

    version: _Version
    nonce: _Nonce
    instance: _Instance


class Proof(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The client knows the secret."""

    mac: _Mac


class Welcome(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The server knows it too."""

    mac: _Mac


class Refusal(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """The connection ends here."""

    reason: Annotated[str, Meta(max_length=512)]


_Result = TypeVar("_Result")
_Frame = TypeVar("_Frame", Hello, Challenge, Proof, Welcome)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind | Refusal) for kind in (Hello, Challenge, Proof, Welcome)
}
"""Made once, when this is imported: msgspec crashes where two threads use a type for the first time at once."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What this process says of itself."""

    secret: bytes = field(default=b"", repr=False)
    """Shared by all processes of the deployment; empty: only peers on this host are reachable."""
    compatibility: bytes = b""
    """Digest of whatever must be equal on both sides."""
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(INSTANCE_NBYTES))
    """This life of this process; a restarted one has another."""

    def __post_init__(self) -> None:
        if 0 < len(self.secret) < MIN_SECRET_NBYTES:
            raise ValueError(f"secret of {len(self.secret)} bytes: expected at least {MIN_SECRET_NBYTES}, or none")
        if len(self.instance) != INSTANCE_NBYTES or len(self.compatibility) > 64:
            raise ValueError(f"instance must have {INSTANCE_NBYTES} bytes, compatibility at most 64")


def _framed(frame: Hello | Challenge | Proof | Welcome | Refusal) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(4, "little") + body


class _Side:
    """What both sides share: framing and transcript."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.peer: bytes | None = None
        """The other side's instance, once the handshake is over and right."""
        self.version = VERSION
        """That both sides speak; before they have found it, the newest that this one does."""
        self._buffer = bytearray()
        self._transcript = hashlib.sha256()

    @property
    def leftover(self) -> bytes:
        """Bytes that came after the last frame of the handshake."""
        return bytes(self._buffer)

    def _encode(self, frame: Hello | Challenge | Proof | Welcome | Refusal) -> bytes:
        data = _framed(frame)
        self._transcript.update(data)
        return data

    def _decode(self, kind: type[_Frame]) -> _Frame | None:
        """The next frame, or None until more bytes came. Does not enter it into the transcript: see `_enter`."""
        if len(self._buffer) < 4:
            return None
        length = int.from_bytes(self._buffer[:4], "little")
        if length > MAX_FRAME_NBYTES:
            raise HandshakeError(f"malformed handshake: a frame of {length} bytes, at most {MAX_FRAME_NBYTES} are read")
        if len(self._buffer) < 4 + length:
            return None
        body = bytes(self._buffer[4 : 4 + length])
        try:
            frame = _decoders[kind].decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
            raise HandshakeError(f"malformed handshake: {str(error)[:200]}") from None
        if isinstance(frame, Refusal):
            raise HandshakeError(f"the peer refused: {frame.reason!r}")
        self._received = bytes(self._buffer[: 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def _mac(self, label: bytes) -> bytes:
        return hmac.digest(self.identity.secret, label + self._transcript.digest(), "sha256")

    def _enter(self) -> None:
        self._transcript.update(self._received)


class Client(_Side):
    """The side that connects."""

    def __init__(self, identity: Identity, purpose: str, expected: bytes | None = None) -> None:
        """`expected`: the instance that must answer, where it is known."""
        super().__init__(identity)
        self._purpose, self._expected = purpose, expected
        self._challenge: Challenge | None = None

    def start(self) -> bytes:
        """The first bytes to send."""
        return self._encode(
            Hello(
                OLDEST_VERSION, self.version, secrets.token_bytes(_NONCE_NBYTES), self.identity.instance,
                self.identity.compatibility, self._purpose,
            )
        )  # fmt: skip

    def receive(self, data: bytes) -> bytes:
        """Take bytes, give bytes to send. Raises HandshakeError."""
        self._buffer += data
        answer = b""
        if self._challenge is None:
            challenge = self._decode(Challenge)
            if challenge is None:
                return b""
            if not OLDEST_VERSION <= challenge.version <= self.version:
                raise HandshakeError(
                    f"the peer wants version {challenge.version}: this side speaks up to {self.version}"
                )
            if self._expected not in (None, challenge.instance):
                raise AnotherInstance("another process answers there: the peer has restarted")
            self._enter()
            self._challenge, self.version = challenge, challenge.version
            answer = self._encode(Proof(self._mac(b"client")))
        welcome = self._decode(Welcome)
        if welcome is not None:
            if not hmac.compare_digest(welcome.mac, self._mac(b"server")):
                raise HandshakeError("the peer has another secret")
            self.peer = self._challenge.instance
        return answer


class Server(_Side):
    """The side that listens, one object for each connection."""

    def __init__(self, identity: Identity, purpose: str) -> None:
        super().__init__(identity)
        self._purpose = purpose
        self._hello: Hello | None = None

    def receive(self, data: bytes) -> bytes:
        """Take bytes, give bytes to send. Raises HandshakeError; `refusal` makes the bytes that tell the client."""
        self._buffer += data
        answer = b""
        if self._hello is None:
            hello = self._decode(Hello)
            if hello is None:
                return b""
            version = min(self.version, hello.version)
            if version < max(OLDEST_VERSION, hello.oldest_version):
                raise HandshakeError(
                    f"versions {hello.oldest_version}..{hello.version} asked for: "
                    f"this side speaks {OLDEST_VERSION}..{self.version}"
                )
            self._enter()
            self._hello, self.version = hello, version
            answer = self._encode(Challenge(version, secrets.token_bytes(_NONCE_NBYTES), self.identity.instance))
        proof = self._decode(Proof)
        if proof is None:
            return answer
        if not hmac.compare_digest(proof.mac, self._mac(b"client")):
            raise HandshakeError("wrong secret")
        self._enter()
        self._check_fit(self._hello)
        self.peer = self._hello.instance
        return answer + self._encode(Welcome(self._mac(b"server")))

    def _check_fit(self, hello: Hello) -> None:
        if hello.purpose != self._purpose:
            raise HandshakeError(f"purpose {hello.purpose!r}: {self._purpose!r} is served here")
        if hello.compatibility != self.identity.compatibility:
            raise HandshakeError(
                f"compatibility: digest {hello.compatibility.hex() or 'none'} does not match "
                f"{self.identity.compatibility.hex() or 'none'}: model, engine or layout differ"
            )

    @staticmethod
    def refusal(error: HandshakeError) -> bytes:
        """What tells the client why."""
        return _framed(Refusal(str(error)[:512]))


def shake(connection: socket.socket | Channel, client: Client, deadline_at: float) -> None:
    """Run the client's side over a blocking socket, until the deadline at the latest.

    Raises:
        ConnectionError: the other side hung up, and may not do so the next time: see `insist`.
        Unavailable: everything else that stands in the way.
    """
    try:
        _set_timeout(connection, deadline_at)
        connection.sendall(client.start())
        while client.peer is None:
            _set_timeout(connection, deadline_at)
            data = connection.recv(MAX_FRAME_NBYTES)
            if not data:
                raise ConnectionResetError("the peer closed the connection during the handshake")
            connection.sendall(client.receive(data))
    except HandshakeError as error:
        raise Unavailable(str(error)) from error
    except ConnectionError:
        raise
    except OSError as error:
        raise Unavailable(f"the handshake broke off: {error}") from error
    if client.leftover:
        raise Unavailable("the peer sent bytes out of turn after the handshake")


def insist(attempt: Callable[[], _Result], deadline_at: float) -> _Result:
    """What `attempt` returns, which connects and shakes hands; it is made again where the other side hung up.

    Raises what the last one raises. None begins after the deadline.
    """
    for pause_s in AGAIN_S:
        try:
            return attempt()
        except ConnectionRefusedError:
            raise
        except ConnectionError:
            if time.monotonic() + pause_s >= deadline_at:
                raise
            time.sleep(pause_s)
    return attempt()


def _set_timeout(connection: socket.socket | Channel, deadline_at: float) -> None:
    left = deadline_at - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def is_loopback(host: str) -> bool:
    """Whether `host` stays on this machine. Raises ValueError for what is no literal address, but a name to look up."""
    address = ipaddress.ip_address(host)
    if getattr(address, "scope_id", None) and not address.is_link_local:
        raise ValueError(f"{host!r}: only a link-local address has a scope")
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_here(host: str) -> bool:
    """Whether `host`, which may be anything, is this host: "" or an address of the loopback."""
    try:
        return not host or is_loopback(host)
    except ValueError:
        return False


def require_secret(host: str, identity: Identity, *, on_loopback: bool = True) -> None:
    """Raise TransferError where `host` is reached over TCP and no secret is set.

    Args:
        on_loopback: also where it stays on this host, whose every user can reach it.
    """
    try:
        local = is_loopback(host)
    except ValueError:
        raise TransferError(f"address {host!r}: expected a literal IP address") from None
    if not identity.secret and (on_loopback or not local):
        who = "is open to every user of this host" if local else "is not loopback"
        raise TransferError(
            f"address {host!r} {who} and no shared secret is set: set the same secret of at least "
            f"{MIN_SECRET_NBYTES} bytes on all peers, or leave transfer_hosts unset where all of them run on this host"
        )
