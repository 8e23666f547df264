"""The requests to a bucket, each a coroutine, and how they are answered for: counted, mapped to causes, bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from mooncake_connector.config.tiers import ObjectTier
from mooncake_connector.log import get_logger, log_once
from store_client.tiers.base import TierError
from store_client.tiers.loop_thread import LoopThread
from store_client.tiers.object.credentials import SharedCredentials
from store_client.tiers.object.errors import is_missing, is_there_already, knows_no_condition, trouble
from store_client.tiers.object.names import split_url

T = TypeVar("T")
_logger = get_logger(__name__)

IN_FLIGHT = 32
_CONNECT_S = 5.0
_RETRIES = 2
_DELETERS = 4
"""Each deletes ten objects at a time, one by one: not every store knows how to delete many by one request."""
LISTED_AT_ONCE = 1000
"""Objects in one answer to a listing, S3's limit."""


class Bucket:
    """The objects below the prefix of `settings.url`. Names are relative to it.

    The coroutines (`size`, `get`, ...) run in the loop's thread alone, by `all` and `one`.
    Raises TierError, lasting, for settings that no try can succeed with.
    """

    def __init__(self, settings: ObjectTier) -> None:
        place = split_url(settings.url)
        if place is None:
            raise TierError(
                f"tier {settings.title}: `url` is not s3://bucket/prefix: expected a bucket's name of 3 to 63 small "
                "letters, digits, dots and hyphens, and a prefix of letters, digits and !_.*'()=- between slashes",
                "error", lasting=True,
            )  # fmt: skip
        self.title, self.address = settings.title, "/".join(filter(None, (f"s3://{place[0]}", place[1])))
        if settings.endpoint is not None:
            endpoint = urlsplit(settings.endpoint)
            self.address += f" at {endpoint.scheme}://{endpoint.netloc}"
        self.timeout_s = settings.timeout_s
        self.requests: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._puts_have_conditions = True
        self._store = self._open(settings, *place)
        self._loop = LoopThread("mooncake-connector-object", IN_FLIGHT)

    def close(self) -> None:
        self._loop.close()

    def all(self, requests: Iterable[Callable[[], Awaitable[T]]], deadline_s: float) -> list[T | None]:
        """What each request returned, None for one that failed. Raises TierError where all failed, or one in a way
        that will last."""
        results = self._loop.all(requests, deadline_s)
        wrong = [trouble(result) for result in results if isinstance(result, BaseException)]
        for one in wrong:
            self.failures[one.cause] += 1
        for one in wrong:
            if one.lasting or len(wrong) == len(results):
                raise one.error(self._where)
        if wrong:
            log_once(
                f"tier.object.{self.title}.{wrong[0].cause}", "%s: %d of %d requests failed: %s",
                self._where, len(wrong), len(results), wrong[0].text, logger=_logger,
            )  # fmt: skip
        return [None if isinstance(result, BaseException) else result for result in results]

    def one(self, request: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """What the request returns. Raises TierError where it failed."""
        try:
            return self._loop.one(request, deadline_s)
        except TierError:
            raise
        except Exception as error:
            found = trouble(error)
            self.failures[found.cause] += 1
            raise found.error(self._where) from None

    def listing(self, prefix: str, left_s: Callable[[], float]) -> Iterator[list[dict[str, Any]]]:
        """All objects below a folder, in order, as lists of {path, size, last_modified}. Each request may take as long
        as `left_s` says then."""
        stream = obstore.list(self._store, prefix, chunk_size=LISTED_AT_ONCE)

        async def further() -> Sequence[Any] | None:
            self.requests["list"] += 1
            try:
                return await stream.__anext__()
            except StopAsyncIteration:
                return None

        while found := self.one(further, left_s()):
            yield list(found)

    def delete(self, paths: Sequence[str], deadline_s: float) -> int:
        """Delete objects; return how many it was done for."""
        parts = [part for first in range(_DELETERS) if (part := paths[first::_DELETERS])]

        def deleting(part: Sequence[str]) -> Callable[[], Awaitable[int]]:
            async def request() -> int:
                self.requests["delete"] += len(part)
                await obstore.delete_async(self._store, list(part))
                return len(part)

            return request

        return sum(done or 0 for done in self.all(map(deleting, parts), deadline_s))

    async def probe(self) -> None:
        """Anything that shows whether the bucket is there and may be used."""
        self.requests["list"] += 1
        await obstore.list_with_delimiter_async(self._store)

    async def folders(self, prefix: str) -> list[str]:
        """Names of the folders right below a folder."""
        self.requests["list"] += 1
        return list((await obstore.list_with_delimiter_async(self._store, prefix))["common_prefixes"])

    async def size(self, path: str) -> int | None:
        """Bytes of an object, None where there is none."""
        meta = await self._head(path)
        return None if meta is None else int(meta["size"])

    async def written_s(self, path: str) -> float | None:
        """When an object was written, by the store's clock, in seconds since 1970; None where there is none."""
        meta = await self._head(path)
        return None if meta is None else float(meta["last_modified"].timestamp())

    async def get(self, path: str, nbytes: int) -> Any:
        """The content of an object of that size, as a buffer; None where there is none. One of another size is not
        loaded, however long a stranger made it."""
        self.requests["get"] += 1
        try:
            result = await obstore.get_async(self._store, path)
            return await result.bytes_async() if result.meta["size"] == nbytes else None
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            return None

    async def put(self, path: str, content: bytes, *, absent: bool = False) -> bool:
        """Write an object whole; where it must be `absent` and is not, return False. A store that knows no such
        condition is found out once, and its objects are overwritten from then on."""
        if absent and self._puts_have_conditions:
            self.requests["put"] += 1
            try:
                await obstore.put_async(self._store, path, content, mode="create", use_multipart=False)
                return True
            except Exception as error:
                if is_there_already(error):
                    return False
                if not knows_no_condition(error):
                    raise
                self._puts_have_conditions = False
        self.requests["put"] += 1
        await obstore.put_async(self._store, path, content, use_multipart=False)
        return True

    async def _head(self, path: str) -> Any:
        self.requests["head"] += 1
        try:
            return await obstore.head_async(self._store, path)
        except FileNotFoundError:
            return None

    @property
    def _where(self) -> str:
        return f"tier {self.title} ({self.address})"

    def _open(self, settings: ObjectTier, bucket: str, prefix: str) -> S3Store:
        seconds = timedelta(seconds=settings.timeout_s)
        options: dict[str, Any] = {"credential_provider": SharedCredentials() or None}
        if settings.endpoint is not None:
            # Both, since AWS_ENDPOINT_URL_S3 in the environment would win over the first alone.
            options["endpoint"] = options["aws_endpoint_url_s3"] = settings.endpoint
        if settings.region is not None:
            options["region"] = settings.region
        try:
            return S3Store(
                bucket,
                prefix=prefix or None,
                disable_bulk_delete=True,
                client_options={
                    "allow_http": (settings.endpoint or "").startswith("http://"),
                    "connect_timeout": min(seconds, timedelta(seconds=_CONNECT_S)),
                    "timeout": seconds,
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": seconds},
                **options,
            )
        except Exception as error:
            raise trouble(error)._replace(lasting=True).error(self._where) from None
