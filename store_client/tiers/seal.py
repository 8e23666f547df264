"""The seal of a page in a tier: 64 bytes that say what the page is and prove that it is whole.

    0   8  magic "mckvpg01"
    8   8  size of the page in bytes, little endian
    16  8  XXH3-64 of its bytes, the pool's own checksum
    24  8  XXH3-64 of namespace digest, shard and page key: bytes that lie under another name are refused
    32 32  HMAC-SHA256, keyed by the deployment's secret, of bytes 0 to 32, name and page; zeros where there is no key

A checksum stops no writer, so a tier that others may write to needs the key. The MAC covers a digest of the page
(SHA-256), which costs about a millisecond a MiB; it is computed only where there is a key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

import xxhash

from store_client.tiers.base import SEAL_NBYTES, Pieces, SpaceName

_MAGIC = b"mckvpg01"
_HEAD = struct.Struct("<8sQQQ")
_NO_MAC = bytes(32)


def seal(space: SpaceName, key: bytes, pieces: Pieces, checksum: int, secret: bytes = b"") -> bytes:
    """The seal of a page whose XXH3-64 is `checksum`."""
    named = _name(space, key)
    head = _HEAD.pack(_MAGIC, sum(map(len, pieces)), checksum, xxhash.xxh3_64_intdigest(named))
    return head + (_mac(secret, head, named, pieces) if secret else _NO_MAC)


def why_broken(
    found: bytes, space: SpaceName, key: bytes, pieces: Pieces, checksum: int, secret: bytes = b""
) -> str | None:
    """Why bytes that came from a tier are not that page, or None where they are. `checksum` is of what came."""
    if len(found) != SEAL_NBYTES:
        return f"a seal of {len(found)} bytes"
    magic, nbytes, expected, name = _HEAD.unpack_from(found)
    named = _name(space, key)
    if magic != _MAGIC:
        return "no page of this format"
    if nbytes != sum(map(len, pieces)):
        return f"a page of {nbytes} bytes"
    if name != xxhash.xxh3_64_intdigest(named):
        return "another page"
    if expected != checksum:
        return "wrong checksum"
    if secret and not hmac.compare_digest(found[32:], _mac(secret, found[:32], named, pieces)):
        return "wrong MAC"
    return None


def _name(space: SpaceName, key: bytes) -> bytes:
    shard = space.shard
    where = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
    return space.namespace + struct.pack("<4I", *where) + key


def _mac(secret: bytes, head: bytes, named: bytes, pieces: Pieces) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.data)
    return hmac.digest(secret, b"mooncake-connector tier page v1\0" + head + named + digest.digest(), "sha256")
