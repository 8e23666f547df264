"""Asks an index that speaks the HTTP API of Mooncake's Conductor how much of a prompt each instance has.

The API is that of Mooncake's RFC #1403 and its docs/source/api-reference/http/conductor-indexer.md. Its `/query` wants
token ids, which an instance's own `/tokenize` makes. An index that is slow, wrong or dead costs what it would have
told, and at most the deadline; after some failures in a row it is left alone for a while.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mooncake_connector.deploy.bodies import Body
from mooncake_connector.deploy.instances import Instance
from mooncake_connector.deploy.policies import Prompt
from mooncake_connector.deploy.prompts import are_tokens, text_of, tokens_in
from mooncake_connector.log import log_once

TENANT = "default"
_FAILURES, _PAUSE_S = 3, 5.0
_REGISTER_EVERY_S, _REGISTER_S = 10.0, 5.0
_MAX_ANSWER_NBYTES = 16 << 20
_MOST_TOKENS = 1 << 30
"""More is nonsense, with which no ratio need be computed."""
_OF_CHATS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "add_special_tokens",
)  # fmt: skip
_OF_COMPLETIONS = ("model", "prompt", "add_special_tokens")

Headers = dict[bytes, bytes]
T = TypeVar("T")


class _Failed(Exception):
    """Why a question has no answer: `cause` is counted; `status` of HTTP, if it was refused with one, and `of_request`:
    another may well have an answer."""

    def __init__(self, cause: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.cause, self.status, self.of_request = cause, status, 400 <= status < 500


class Index:
    """Implements `Prefixes`.

    Args:
        url: where the index listens, without a path.
        block_tokens: the size of the blocks by which instances are registered there.
        deadline_s: for all that is asked for one request.
        token: sent as a bearer token; empty for none.
        client: an httpx.AsyncClient.
    """

    def __init__(self, url: str, *, block_tokens: int, deadline_s: float, token: bytes, client: Any) -> None:
        self._url, self._block_tokens, self._deadline_s, self._client = (
            url.rstrip("/"),
            block_tokens,
            deadline_s,
            client,
        )
        self._headers = {b"authorization": b"Bearer " + token} if token else {}
        self._failures, self._not_before_s = 0, 0.0
        self._replaced = set[tuple[str, int]]()
        """Ranks that were registered otherwise. Each once: another deployment may call its own the same."""
        self.outcomes: Counter[str] = Counter()
        """Requests by what became of the question: `answered`, `nothing_to_ask` (no model, or not one prompt),
        `unasked` while it is left alone, or why there was no answer."""

    async def find(self, body: Body, headers: Headers, among: Sequence[Instance]) -> Prompt:
        prompt = Prompt(tokens_in(text_of(body)))
        if time.monotonic() < self._not_before_s:
            self.outcomes["unasked"] += 1
            return prompt
        until_s, is_index = time.monotonic() + self._deadline_s, False
        try:
            tokens = await self._within(until_s, self._deadline_s, self._tokens(body, headers, among))
            if not tokens:
                self.outcomes["nothing_to_ask"] += 1
                return prompt
            prompt, is_index = Prompt(len(tokens)), True
            asked = self._post(f"{self._url}/query", self._question(body, tokens), {})
            answer = await self._within(until_s, self._deadline_s, asked)
            prompt = Prompt(len(tokens), matched(answer, [one.url for one in among]))
        except _Failed as error:
            self._failed(error, is_index)
            return prompt
        self._failures = 0
        self.outcomes["answered"] += 1
        return prompt

    def sent(self, prompt: Prompt, one: Instance) -> None:
        """The index hears of it from the instance."""

    async def keep_registered(self, kind: str, publishing: Sequence[Sequence[str]]) -> None:
        """Register instances that publish events, again and again: an index that was started anew knows of none.

        Args:
            kind: "vLLM" or "SGLang".
            publishing: of each data-parallel rank of an instance the URL, its number, where its events are heard, and
                where they are replayed if they are.
        """
        await asyncio.gather(*(self._keep_one(kind, *one) for one in publishing))

    async def _keep_one(self, kind: str, url: str, rank: str, *endpoints: str) -> None:
        """By itself, so that one that hangs holds up no other."""
        while True:
            try:
                registered = self._register(kind, url, int(rank), endpoints)
                await self._within(time.monotonic() + _REGISTER_S, _REGISTER_S, registered)
            except _Failed as error:
                said = "%s is not registered with the index, which will be tried again: %s"
                log_once(f"router.register.{url}.{error.cause}", said, url, error)
            await asyncio.sleep(_REGISTER_EVERY_S)

    async def _register(self, kind: str, url: str, rank: int, endpoints: Sequence[str]) -> None:
        models = await self._client.get(f"{url}/v1/models")
        if models.status_code in (401, 403):
            said = f"/v1/models answered {models.status_code}: it has an API key, which is not known here"
            raise _Failed("locked", f"{said}; register it yourself")
        name = {"instance_id": url, "dp_rank": rank, "tenant_id": TENANT}
        registration = {
            **name, "type": kind, "modelname": models.raise_for_status().json()["data"][0]["id"],
            "block_size": self._block_tokens,
            **dict(zip(("endpoint", "replay_endpoint"), endpoints, strict=False)),
        }  # fmt: skip
        try:
            await self._post(f"{self._url}/register", registration, {})
        except _Failed as error:
            if error.status != 409 or (url, rank) in self._replaced or not await self._is_outdated(registration):
                raise
            await self._post(f"{self._url}/unregister", name, {})
            self._replaced.add((url, rank))
            await self._post(f"{self._url}/register", registration, {})

    async def _is_outdated(self, registration: Body) -> bool:
        """Whether the index has an instance as a former deployment registered it: it publishes there no more, or is of
        another model. One without an endpoint was registered by a person, who wanted it so."""
        found = await self._client.get(f"{self._url}/services", headers=self._headers)
        names = ("instance_id", "dp_rank", "tenant_id")
        for known in found.raise_for_status().json().get("services", ()):
            if all(known.get(name) == registration[name] for name in names) and known.get("endpoint"):
                return any(known.get(name) != registration[name] for name in ("endpoint", "modelname", "block_size"))
        return False

    def _failed(self, error: _Failed, is_index: bool) -> None:
        """What an instance does not tokenize, or the index refuses, may be any client's: that does not count for it."""
        cause = f"index_{error.cause}" if is_index else f"tokenize_{error.cause}"
        self.outcomes[cause] += 1
        if is_index and not error.of_request:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._not_before_s = time.monotonic() + _PAUSE_S
        log_once(f"router.{cause}", "the index is not of use, so requests go by load alone: %s", error)

    @staticmethod
    async def _within(until_s: float, deadline_s: float, work: Coroutine[Any, Any, T]) -> T:
        """`deadline_s`: what is said where it is late; a question takes two such steps until one moment."""
        task = asyncio.ensure_future(work)
        try:  # not by wait_for: before Python 3.12 that forgets that it is cancelled where its work has just ended
            await asyncio.wait((task,), timeout=max(0.0, until_s - time.monotonic()))
            if not task.done():
                raise _Failed("late", f"no answer within {deadline_s:g} s")
            return task.result()
        except _Failed:
            raise
        except Exception as error:  # httpx has many, and no request may fail for any of them
            raise _Failed("unreachable", repr(error)) from None
        finally:
            task.cancel()

    def _question(self, body: Body, tokens: list[int]) -> Body:
        salt = body.get("cache_salt")
        return {
            "model": body["model"],
            "token_ids": tokens,
            "tenant_id": TENANT,
            "block_size": self._block_tokens,
            **({"cache_salt": salt} if salt and isinstance(salt, str) else {}),
        }

    async def _tokens(self, body: Body, headers: Headers, among: Sequence[Instance]) -> list[int]:
        """Of the one prompt of a request; none where it has several, or something else, or names no model."""
        prompt = body.get("prompt")
        if not body.get("model") or not isinstance(body["model"], str):
            return []
        if isinstance(prompt, list):
            return prompt if are_tokens(prompt) else []
        asked = min((one for one in among if one.healthy), key=lambda one: one.load, default=None)
        if asked is None:
            return []
        question = {key: body[key] for key in (_OF_CHATS if prompt is None else _OF_COMPLETIONS) if key in body}
        answer = await self._post(f"{asked.url}/tokenize", question, headers)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not are_tokens(tokens):
            raise _Failed("wrong", f"{asked.url}/tokenize answered no token ids")
        return tokens

    async def _post(self, url: str, question: Body, headers: Headers) -> Any:
        headers = {**(headers or self._headers), b"content-type": b"application/json"}
        request = self._client.build_request("POST", url, content=json.dumps(question), headers=headers)
        found = await self._client.send(request, stream=True)
        try:
            data = bytearray()
            async for piece in found.aiter_bytes():
                data += piece
                if len(data) > _MAX_ANSWER_NBYTES:
                    raise _Failed("wrong", f"{url} answered more than {_MAX_ANSWER_NBYTES} bytes")
        finally:
            await found.aclose()
        if found.status_code != 200:
            answered = f"{url} answered {found.status_code} {data[:200].decode(errors='replace')}"
            raise _Failed("refused", answered, found.status_code)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise _Failed("wrong", f"{url} answered what is no JSON") from None


def matched(answer: Any, urls: Sequence[str]) -> dict[str, int]:
    """What an answer to `/query` says of instances, which it may name by URL or by `host:port`; raises _Failed.

    Instances that this router does not have are left out.
    """
    told = answer.get(TENANT, {}) if isinstance(answer, dict) else None
    if not isinstance(told, dict):
        raise _Failed("wrong", f"/query answered no instances of the tenant {TENANT}")
    found: dict[str, int] = {}
    for url in urls:
        of = told.get(url, told.get(urlsplit(url).netloc))
        if of is None:
            continue
        tokens = of.get("longest_matched") if isinstance(of, dict) else None
        if type(tokens) is not int or tokens < 0:
            raise _Failed("wrong", f"/query answered no number of tokens for {url}")
        found[url] = min(tokens, _MOST_TOKENS)
    return found
