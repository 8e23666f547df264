"""Which namespaces and shards a pool has met, so that people and other shards can be told: a file of JSON lines.

What a page means is not decided here: each row holds the identity of its namespace and shard.
"""

import errno
import hashlib
import json
import os
from pathlib import Path

from mooncake_connector.errors import NamespaceError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded.files import open_file, read_file

SpaceName = tuple[bytes, Shard]
"""Namespace digest and shard."""


def identify(name: SpaceName) -> int:
    """64 bits that stand for a namespace and a shard: the first 8 bytes of SHA256(digest || four bounds)."""
    digest, shard = name
    bounds = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
    text = digest + b"".join(bound.to_bytes(8, "little") for bound in bounds)
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Spaces:
    """The file only grows and is read without a lock. A line torn by a killed writer or a full disk is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, tuple[Namespace, Shard]] = {}
        self._seen = (-1, -1, -1)
        self._read_to = 0

    def all(self) -> dict[int, tuple[Namespace, Shard]]:
        """By identity."""
        self._refresh()
        return dict(self._known)

    def register(self, namespace: Namespace, shard: Shard) -> int:
        """Make sure that the file names the space; its identity. Under the write lock only. Raises OSError (ENOSPC)."""
        identity = identify((namespace.digest, shard))
        if identity in self._known:
            return identity
        self._refresh()
        if identity not in self._known:
            self._append(namespace, shard)
            self._known[identity] = (namespace, shard)
        return identity

    def _append(self, namespace: Namespace, shard: Shard) -> None:
        bounds = [shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop]
        # The newline in front ends a line that a killed writer left unfinished.
        line = f"\n{json.dumps({'shard': bounds, 'namespace': namespace.to_dict()})}\n".encode()
        fd = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) != len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(self._path))
        finally:
            os.close(fd)

    def _refresh(self) -> None:
        """Read what was added: whole lines, so that the next look begins where a line does."""
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen == self._seen:
                return
            if seen[0] != self._seen[0] or seen[1] < self._read_to:
                self._read_to = 0
            added = read_file(self._path, self._read_to)
        except OSError:
            return
        *lines, unfinished = added.split(b"\n")
        for line in lines:
            if line:
                self._learn(line)
        self._read_to += len(added) - len(unfinished)
        self._seen = seen

    def _learn(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            namespace, shard = Namespace.from_dict(entry["namespace"]), Shard(*entry["shard"])
            self._known[identify((namespace.digest, shard))] = (namespace, shard)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, NamespaceError):
            return
