"""Which namespaces and shards a pool has met: a file of JSON lines that only grows, read without a lock."""

import json
import os
from pathlib import Path

from mooncake_connector.errors import NamespaceError
from mooncake_connector.namespace import Namespace
from store_client.base import Shard

SpaceName = tuple[bytes, Shard]
"""Namespace digest and shard."""


class Spaces:
    """Numbers for (namespace, shard), the same in every process. A line torn by a killed writer is skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[SpaceName, int] = {}
        self._known: dict[int, tuple[Namespace, Shard]] = {}
        self._read_to = -1

    def find(self, name: SpaceName) -> int | None:
        """The number of a space that some process has registered."""
        found = self._ids.get(name)
        if found is None and self._refresh():
            found = self._ids.get(name)
        return found

    def all(self) -> dict[int, tuple[Namespace, Shard]]:
        self._refresh()
        return dict(self._known)

    def register(self, namespace: Namespace, shard: Shard) -> int:
        """The number of the space, a new one if need be. Under the write lock only. Raises OSError (ENOSPC)."""
        found = self.find((namespace.digest, shard))
        if found is not None:
            return found
        number = max(self._known, default=0) + 1
        bounds = [shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop]
        line = json.dumps({"id": number, "shard": bounds, "namespace": namespace.to_dict()})
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # The newline in front ends a line that a killed writer left unfinished.
            os.write(fd, f"\n{line}\n".encode())
        finally:
            os.close(fd)
        self._refresh()
        return self._ids[(namespace.digest, shard)]

    def _refresh(self) -> bool:
        """Read the file again if it grew; True if it did."""
        try:
            size = os.stat(self._path).st_size
            if size == self._read_to:
                return False
            text = self._path.read_bytes()
        except OSError:
            return False
        for line in text.split(b"\n")[:-1]:
            self._learn(line)
        self._read_to = len(text)
        return True

    def _learn(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            namespace, shard = Namespace.from_dict(entry["namespace"]), Shard(*entry["shard"])
            number = int(entry["id"])
        except (ValueError, KeyError, TypeError, NamespaceError):
            return
        self._known[number] = (namespace, shard)
        self._ids[(namespace.digest, shard)] = number
