"""Instances behind the built-in router: which are well, and whether one that was asked still answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import httpx

from mooncake_connector.deploy.asgi import Answered, ended, problem
from mooncake_connector.deploy.instances import Instance

HEALTH_EVERY_S, HEALTH_LIMIT_S = 1.0, 10.0

T = TypeVar("T")


class NoAnswer(Exception):
    """An instance did not answer, or `answer` that it cannot, so another may be asked."""

    def __init__(self, answer: Answered | None = None) -> None:
        self.answer = answer


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
