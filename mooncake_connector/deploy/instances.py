"""Instances behind the built-in router: what each has to do, and which of one role gets the next request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from mooncake_connector.deploy.policies import Policy, Prompt

FAILURES = 3
"""Failures in a row, of /health or of a connection, after which an instance is asked nothing until it is well again."""


@dataclass(slots=True)
class Instance:
    """`load` counts requests under way, `failures` those in a row; at first it has to show that it is well."""

    url: str
    peer_port: int = 0
    peer_host: str = ""
    load: int = 0
    failures: int = FAILURES
    prefill_tokens: int = 0
    """Of prompts of which it has not answered anything yet, as far as it is thought to lack them in its cache."""
    asked: int = 0
    """Requests sent to it so far; of these the tokens of prompts, and those thought to be cached."""
    prompt_tokens: int = 0
    cached_tokens: int = 0

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
    policy: Policy
    _turn: int = 0

    def choose(
        self, tried: Sequence[Instance], prompt: Prompt | None = None, *, takes_turn: bool = True
    ) -> Instance | None:
        """The one of the healthy that were not tried that the policy wants; None where there is none.

        Args:
            prompt: what the instance will compute; None where that is nothing, or not known.
        """
        self._turn += takes_turn
        order = [self.instances[(self._turn + at) % len(self.instances)] for at in range(len(self.instances))]
        left = [one for one in order if one.healthy and one not in tried]
        return left[self.policy.choose(left, prompt)] if left else None

    @property
    def healthy(self) -> bool:
        return any(one.healthy for one in self.instances)


class Work:
    """One request at one instance, which counts there from now until `end`, and its prompt until `prefilled`."""

    def __init__(self, one: Instance, prompt: Prompt | None = None) -> None:
        self._one, self._load = one, 1
        self._tokens = prompt.left_for(one) if prompt is not None else 0
        one.load += self._load
        one.prefill_tokens += self._tokens
        one.asked += 1
        if prompt is not None:
            one.prompt_tokens += prompt.tokens
            one.cached_tokens += prompt.tokens - self._tokens

    def prefilled(self) -> None:
        self._one.prefill_tokens -= self._tokens
        self._tokens = 0

    def end(self, task: object = None) -> None:
        """Also what a task calls when it is done."""
        self.prefilled()
        self._one.load -= self._load
        self._load = 0

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()


def instance(text: str) -> Instance:
    """`URL,PORT,HOST`, the last two of which may be left out."""
    url, _, peer = text.partition(",")
    port, _, host = peer.partition(",")
    return Instance(url.rstrip("/"), int(port or 0), host or "127.0.0.1")
