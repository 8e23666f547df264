"""How finely one transfer is divided, and which part of it may travel once so much of it has been computed.

Not responsible for when the engine computes what, nor for the bytes (`transfer.plan.pairing`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from transfer.transports.base import TransferError


class Granularity(enum.Enum):
    """When KV leaves the producer."""

    FULL = "full"
    """All at once, when the prompt is computed."""
    CHUNK = "chunk"
    """All layers of the tokens that a prefill chunk completed."""
    LAYER = "layer"
    """Each layer when it is computed, while the next one is."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """From how many prompt tokens on a transfer is divided; `fixed` overrides that.

    Raises:
        TransferError: the bounds are negative or not ascending.
    """

    chunk_tokens: int = 512
    layer_tokens: int = 4096
    fixed: Granularity | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.chunk_tokens <= self.layer_tokens:
            raise TransferError(
                f"granularity bounds {self.chunk_tokens} and {self.layer_tokens} tokens: expected 0 <= chunk <= layer"
            )

    def choose(self, prompt_tokens: int) -> Granularity:
        if self.fixed is not None:
            return self.fixed
        if prompt_tokens < self.chunk_tokens:
            return Granularity.FULL
        return Granularity.CHUNK if prompt_tokens <= self.layer_tokens else Granularity.LAYER


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of a transfer that travels together: tokens `[first_token, stop_token)` of some layers of a section."""

    first_layer: int
    num_layers: int
    first_token: int
    stop_token: int
    section: int = 0
    """The consumer's number of it."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def places(self) -> int:
        """Layers times tokens."""
        return self.num_layers * (self.stop_token - self.first_token)


class Divider:
    """Divides a section of one transfer into batches as it is computed: every layer and token is in exactly one.

    Args:
        layers: numbers in the model; not empty.
        tokens: of the request; maybe none.
        unit: batches begin and end at multiples of so many tokens, or end at the end.
        min_layers: with LAYER, wait for so many layers, so that a batch is worth a system call.
        section, own: the consumer's and the producer's number of it.
        is_whole: it is sent when prefill is over.

    Raises:
        TransferError: the first token is no multiple of `unit`.
    """

    def __init__(
        self,
        granularity: Granularity,
        layers: range,
        tokens: range,
        unit: int,
        min_layers: int = 1,
        section: int = 0,
        own: int = 0,
        *,
        is_whole: bool = False,
    ) -> None:
        if tokens and tokens.start % unit:
            raise TransferError(f"tokens from {tokens.start} on are wanted where {unit} are moved together")
        self.own, self._section, self._is_whole = own, section, is_whole
        self._granularity, self._layers, self._tokens = granularity, layers, tokens
        self._unit = unit
        self._min_layers = min_layers if granularity is Granularity.LAYER else len(layers)
        self._sent = dict.fromkeys(layers, tokens.start)
        """How far each layer is in batches."""

    def computed(self, layer: int, stop_token: int) -> list[Batch]:
        """Batches that may travel now that all layers up to `layer` have the KV of tokens before `stop_token`."""
        return [] if self._is_whole else self._divide(layer, stop_token)

    def finished(self, num_tokens: int) -> list[Batch]:
        """What is left, now that prefill is over and the request has so many tokens."""
        return self._divide(self._layers.stop - 1, self._tokens.stop if self._is_whole else num_tokens)

    def _divide(self, layer: int, stop_token: int) -> list[Batch]:
        stop = self._rounded(stop_token)
        first = self._layers.start
        found: list[Batch] = []
        last = layer >= self._layers.stop - 1
        while first < min(layer + 1, self._layers.stop):
            start = self._sent[first]
            count = 1
            while first + count <= min(layer, self._layers.stop - 1) and self._sent[first + count] == start:
                count += 1
            if start < stop and (last or count >= self._min_layers):
                found.append(Batch(first, count, start, stop, self._section))
                self._sent.update(dict.fromkeys(range(first, first + count), stop))
            first += count
        return found

    @property
    def complete(self) -> bool:
        """Whether everything is in batches."""
        return min(self._sent.values()) >= self._tokens.stop

    def _rounded(self, stop_token: int) -> int:
        if stop_token >= self._tokens.stop:
            return self._tokens.stop
        if self._granularity is Granularity.FULL:
            return self._tokens.start
        return stop_token // self._unit * self._unit
