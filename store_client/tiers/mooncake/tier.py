"""`MooncakeCluster`: pages in a Mooncake Store, each with its seal in front, under names of ours."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mooncake_connector.config.tiers import MooncakeTier
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Put
from store_client.tiers.base import SEAL_NBYTES, Pieces, Sealed, SpaceName, Target, Tier, TierError, TierStats
from store_client.tiers.checks import check_keys, check_sealed, check_targets
from store_client.tiers.mooncake import status
from store_client.tiers.mooncake.library import load, replication, version
from store_client.tiers.mooncake.link import Link
from store_client.tiers.mooncake.markers import Markers
from store_client.tiers.mooncake.memory import Place, Range, Registered, Side, Sides, groups
from store_client.tiers.mooncake.movers import Movers
from store_client.tiers.mooncake.names import page_name, pattern
from store_client.tiers.mooncake.settings import client_settings

_NAMES_AT_ONCE = 1024
"""In one call that moves no bytes."""
_log = get_logger(__name__)


class MooncakeCluster(Tier):
    """Args: `settings`: what is not set there is Mooncake's own file, variables or default.

    It is there at once, and its first call waits for the master. Raises TierError, lasting, where the wheel is missing
    or no master is named.
    """

    parallel = 3  # with two the cluster waits while both are verified and published

    def __init__(self, settings: MooncakeTier, pool_name: str = "") -> None:
        self._title = settings.title
        self._settings = client_settings(settings, os.environ)
        library = load(self._title)
        self._config = replication(library, settings)
        self._registered = Registered()
        self._sides = Sides(self._registered)
        self._link = Link(self._title, self._settings, library, self._registered)
        self._movers = Movers(self._title)
        self._counts, self._lock = Counter[str](), threading.Lock()
        self._writing, self._changed = set[str](), threading.Condition()
        self._refused_puts = 0
        self._markers = Markers(self._title, self._are_there, self._fetched, self._stored, self._removed)

    def register(self, memory: Bytes) -> None:
        self._registered.add(memory)

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        check_keys(keys)
        return self._are_there([page_name(space, key) for key in keys], deadline_s)

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        check_targets(targets, nbytes)
        names = [page_name(space, target.key) for target in targets]
        return self._fetched(names, [target.pieces for target in targets], nbytes, deadline_s)

    def _fetched(
        self, names: Sequence[str], places: Sequence[Pieces], nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        seals: list[bytes | None] = [None] * len(names)
        codes: list[int] = []
        end_s = time.monotonic() + deadline_s
        pages = list(enumerate(places))
        for group in groups(self._registered, pages, nbytes, self.batch_nbytes):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            with self._sides.one() as side, self._link.client(left_s) as client:
                codes += self._read_group(client, side, group, names, seals, nbytes, left_s)
        self._judge("read", codes, len(names), nbytes, names)
        return seals

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        check_sealed(pages, nbytes)
        end_s = time.monotonic() + deadline_s
        puts = self._stored([page_name(space, page.key) for page in pages], pages, nbytes, deadline_s)
        if any(put is not Put.FAILED for put in puts):
            self._markers.note(space, end_s - time.monotonic())
        return puts

    def _stored(self, names: Sequence[str], pages: Sequence[Sealed], nbytes: int, deadline_s: float) -> list[Put]:
        end_s = time.monotonic() + deadline_s
        mine, others = self._begin(names)
        try:
            puts = self._written(names, mine, pages, nbytes, end_s)
        finally:
            self._end(mine)
        # Mooncake calls it a success to put what another call is still writing, and only then can it be read.
        with self._changed:
            self._changed.wait_for(lambda: self._writing.isdisjoint(others), max(0.0, end_s - time.monotonic()))
        return puts

    def _written(
        self, names: Sequence[str], mine: set[str], pages: Sequence[Sealed], nbytes: int, end_s: float
    ) -> list[Put]:
        puts = [Put.PRESENT] * len(pages)
        # A put of a page that is there is a success too, so it has to be asked first.
        there = self._listed(names, lambda client: client.batch_is_exist, end_s - time.monotonic())
        first = {name: number for number, name in reversed(list(enumerate(names)))}
        absent = [
            number for number, name in enumerate(names) if there[number] != 1 and name in mine and first[name] == number
        ]
        for number in absent:
            puts[number] = Put.FAILED
        codes: list[int] = []
        wanted = [(number, pages[number].pieces) for number in absent]
        for group in groups(self._registered, wanted, nbytes, self.batch_nbytes):
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            with self._sides.one() as side, self._link.client(left_s) as client:
                codes += self._write_group(client, side, group, names, pages, puts, nbytes, left_s)
        self._judge("write", codes, len(absent), nbytes, names)
        return puts

    def _begin(self, names: Sequence[str]) -> tuple[set[str], set[str]]:
        """Which of them this call writes, and which others are being written by another one."""
        with self._changed:
            others = self._writing.intersection(names)
            mine = set(names) - others
            self._writing |= mine
        return mine, others

    def _end(self, mine: set[str]) -> None:
        with self._changed:
            self._writing -= mine
            self._changed.notify_all()

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        return self._removed([page_name(space, key) for key in keys], deadline_s)

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        """The master looks at every name it has; where that takes it too long to answer, it is asked again. Of all
        namespaces the markers count as well."""
        end_s, count = time.monotonic() + deadline_s, 0
        self._markers.clear(namespace, deadline_s)
        try:
            while True:
                with self._link.client(max(0.0, end_s - time.monotonic())) as client:
                    found = int(client.remove_by_regex(pattern(namespace), True))
                if found >= 0:
                    return count + found
                if found != status.RPC_TIMEOUT or time.monotonic() > end_s:
                    raise self._masters("clear", found)
        finally:
            if namespace is None:
                self._markers.look_again()

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        return self._markers.shards(namespace, deadline_s)

    def stats(self) -> TierStats:
        settings = self._settings
        state = self._link.state
        notes = {"master": settings.master, "protocol": settings.protocol}
        notes |= {"state": state} if state == "connected" else {"not open": state}
        with self._lock:
            notes |= {what: str(count) for what, count in sorted(self._counts.items())}
        if self._link.setups > 1:
            notes["set up"] = f"{self._link.setups} times"
        return TierStats(notes=notes)

    def close(self) -> None:
        self._link.close()
        self._movers.close()

    def _are_there(self, names: Sequence[str], deadline_s: float) -> list[bool]:
        return [found == 1 for found in self._listed(names, lambda client: client.batch_is_exist, deadline_s)]

    def _removed(self, names: Sequence[str], deadline_s: float) -> int:
        return self._listed(names, lambda client: lambda some: client.batch_remove(some, True), deadline_s).count(0)

    def _listed(
        self, names: Sequence[str], call: Callable[[Any], Callable[[Any], Any]], deadline_s: float
    ) -> list[int]:
        """The status of each name, from calls that move no bytes."""
        end_s, found = time.monotonic() + deadline_s, list[int]()
        for start in range(0, len(names), _NAMES_AT_ONCE):
            if (left_s := end_s - time.monotonic()) <= 0:
                raise TierError(f"tier {self._title}: no time was left for {len(names)} names", "timeout")
            with self._link.client(left_s) as client:
                found += call(client)(list(names[start : start + _NAMES_AT_ONCE]))
            if status.is_masters(found[-1]):
                raise self._masters("ask for pages", found[-1])
        return found

    def _read_group(
        self,
        client: Any,
        side: Side,
        group: Sequence[Place],
        names: Sequence[str],
        seals: list[bytes | None],
        nbytes: int,
        left_s: float,
    ) -> list[int]:
        """Fills pieces and seals; the status of each page, which is its length with the seal where it is there."""
        buffers = self._buffers(side, group, nbytes)
        some, whole = [names[place.number] for place in group], nbytes + SEAL_NBYTES
        read = partial(self._movers.move, client.batch_get_into_multi_buffers, deadline_s=left_s)
        codes = read(some, buffers)
        if again := [at for at, code in enumerate(codes) if code == status.LEASE_EXPIRED]:
            later = read([some[at] for at in again], [buffers[at] for at in again])
            for at, code in zip(again, later, strict=True):
                codes[at] = code
        for at, (place, code) in enumerate(zip(group, codes, strict=True)):
            if code != whole:
                continue
            seals[place.number] = side.seal(at).tobytes()
            if not place.buffers:
                _spread(self._staged(side, at, len(group), nbytes), place.pieces)
        return codes

    def _write_group(
        self,
        client: Any,
        side: Side,
        group: Sequence[Place],
        names: Sequence[str],
        pages: Sequence[Sealed],
        puts: list[Put],
        nbytes: int,
        left_s: float,
    ) -> list[int]:
        buffers = self._buffers(side, group, nbytes)
        for at, place in enumerate(group):
            side.seal(at)[:] = np.frombuffer(pages[place.number].seal, dtype=np.uint8)
            if not place.buffers:
                np.concatenate(place.pieces, out=self._staged(side, at, len(group), nbytes))
        some, write = [names[place.number] for place in group], client.batch_put_from_multi_buffers
        codes = self._movers.move(write, some, buffers, self._config, deadline_s=left_s)
        for place, code in zip(group, codes, strict=True):
            if code == 0:
                puts[place.number] = Put.STORED
        return codes

    def _buffers(self, side: Side, group: Sequence[Place], nbytes: int) -> list[list[Range]]:
        """Of each page: its seal, then its bytes."""
        found, usable = list[list[Range]](), self._registered.buffers([side.seals]) is not None
        for at, place in enumerate(group):
            parts: Sequence[Range] | None = place.buffers
            if not parts:
                parts = self._registered.buffers([self._staged(side, at, len(group), nbytes)])
            if parts is None or not usable:
                raise TierError(f"tier {self._title}: no memory can be registered with the client", "error")
            found.append([side.seal_range(at), *parts])
        return found

    def _staged(self, side: Side, at: int, count: int, nbytes: int) -> Bytes:
        return side.pages(count * nbytes)[at * nbytes : (at + 1) * nbytes]

    def _judge(self, what: str, codes: Sequence[int], asked: int, nbytes: int, names: Sequence[str]) -> None:
        """Count what went wrong, and raise TierError where nothing went right."""
        bad = Counter(code for code in codes if code < 0 and code != -704)
        with self._lock:
            self._counts.update({f"{what}: {status.words(code)}": count for code, count in bad.items()})
        for code in bad:
            log_once(
                f"tiers.mooncake.{what}:{code}", "tier %s: pages could not be moved (%s): %s", self._title, what,
                status.words(code), logger=_log,
            )  # fmt: skip
        if any(code >= 0 for code in codes):
            if what == "write":
                self._refused_puts = 0
        elif codes and all(status.is_masters(code) for code in codes):
            raise self._masters(what, codes[0])
        elif codes and all(status.is_nodes(code) for code in codes) and not self._is_of_another_size(names[0], nbytes):
            text = f"tier {self._title}: {what}: {status.words(codes[0])}, for all {len(codes)} pages"
            raise TierError(text, "unavailable")
        elif asked and not codes:
            raise TierError(f"tier {self._title}: no time was left for {asked} pages", "timeout")

    def _masters(self, what: str, code: int) -> TierError:
        """What to raise where the master did not do what it was asked for, and what to think of it."""
        text = f"tier {self._title}: {what}: {status.words(code)}, master {self._settings.master}"
        if what == "write" and code == status.RPC_FAILED:
            # It answered which pages it has just before. Once it may have died in between; twice it did not.
            self._refused_puts += 1
            if self._refused_puts > 1:
                return TierError(
                    f"{text}; it answers which pages it has and takes none: it is of another version, probably. This "
                    f"client is {version()}: install the same at the master, the nodes and here",
                    "version",
                )
        self._link.doubt(text)
        return TierError(text, "timeout" if code == status.RPC_TIMEOUT else "unavailable")

    def _is_of_another_size(self, name: str, nbytes: int) -> bool:
        """To read too many bytes fails like a dead node does."""
        with self._link.client(self._settings.rpc_s) as client:
            found = int(client.get_size(name))
        return found >= 0 and found != nbytes + SEAL_NBYTES


def _spread(page: Bytes, pieces: Pieces) -> None:
    at = 0
    for piece in pieces:
        piece[:] = page[at : at + len(piece)]
        at += len(piece)
