"""Instances behind the built-in router: which are well, which is next, whether one that was asked still answers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from mooncake_connector.deploy.asgi import Answered, ended, problem

HEALTH_EVERY_S, HEALTH_LIMIT_S = 1.0, 10.0
FAILURES = 3
"""Failures in a row, of /health or of a connection, after which an instance is asked nothing until it is well again."""

T = TypeVar("T")


class NoAnswer(Exception):
    """An instance did not answer, or `answer` that it cannot, so another may be asked."""

    def __init__(self, answer: Answered | None = None) -> None:
        self.answer = answer


@dataclass(slots=True)
class Instance:
    """`load` counts requests under way, `failures` those in a row; at first it has to show that it is well."""

    url: str
    peer_port: int = 0
    peer_host: str = ""
    load: int = 0
    failures: int = FAILURES

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def healthy(self) -> bool:
        return self.failures < FAILURES


@dataclass(slots=True)
class Group:
    """The instances of one role."""

    instances: Sequence[Instance]
    by_load: bool
    _turn: int = 0

    def choose(self, tried: Sequence[Instance], *, takes_turn: bool = True) -> Instance | None:
        """The next healthy one that was not tried; None where there is none."""
        self._turn += takes_turn
        order = [self.instances[(self._turn + at) % len(self.instances)] for at in range(len(self.instances))]
        left = [one for one in order if one.healthy and one not in tried]
        return min(left, key=lambda one: one.load if self.by_load else 0, default=None)

    @property
    def healthy(self) -> bool:
        return any(one.healthy for one in self.instances)


def instance(text: str) -> Instance:
    """`URL,PORT,HOST`, the last two of which may be left out."""
    url, _, peer = text.partition(",")
    port, _, host = peer.partition(",")
    return Instance(url.rstrip("/"), int(port or 0), host or "127.0.0.1")


@contextlib.contextmanager
def busy(*instances: Instance) -> Iterator[None]:
    for one in instances:
        one.load += 1
    try:
        yield
    finally:
        for one in instances:
            one.load -= 1


async def look(client: Any, instances: Iterable[Instance]) -> None:
    """Ask every instance how it does, for ever."""

    async def ask(one: Instance) -> None:
        while True:
            try:
                is_well = (await client.get(f"{one.url}/health", timeout=HEALTH_LIMIT_S)).status_code == 200
            except Exception:  # whatever it is, all instances are looked at again
                is_well = False
            one.failures = 0 if is_well else one.failures + 1
            await asyncio.sleep(HEALTH_EVERY_S)

    await asyncio.gather(*(ask(one) for one in instances))


async def unless_lost(one: Instance, work: Awaitable[T], why_lost: Callable[[], str]) -> T:
    """What `work` with an instance comes to; NoAnswer where the connection breaks, or `why_lost` gives a reason.

    What says nothing about the instance does not count against it: a request that cannot be sent to any, and an answer
    that takes longer than any may, which another instance would not give sooner.
    """
    task, reason = asyncio.ensure_future(work), ""
    try:
        while not task.done() and not (reason := why_lost()):
            await asyncio.wait((task,), timeout=HEALTH_EVERY_S)
        if task.done():
            return task.result()
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
        raise Answered(400, problem(f"the request cannot be sent on: {error}")) from None
    except httpx.ReadTimeout:
        print(f"{one.url} has not answered in time", file=sys.stderr, flush=True)
        raise Answered(504, problem("the instance that was asked has not answered in time")) from None
    except httpx.TransportError as error:
        one.failures, reason = one.failures + 1, repr(error)
    finally:
        await ended(task)
    print(f"{one.url} does not answer: {reason}", file=sys.stderr, flush=True)
    raise NoAnswer
