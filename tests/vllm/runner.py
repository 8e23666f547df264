"""A model runner that only pretends to compute: it fills KV slots and checks every slot that it would attend to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import oracle
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput


class WrongKV(AssertionError):
    """The cache does not hold what the request's own prefix gives."""


def kv_memory(num_layers: int, num_blocks: int, heads: int, block_tokens: int, layout: str) -> oracle.Slots:
    """KV cache `[layer, block, head, token]` of 64-bit slots, in a layout's order, full of rubbish."""
    sizes = {"L": num_layers, "B": num_blocks, "H": heads, "N": block_tokens}
    order = layout.removesuffix("C")
    memory = np.full([sizes[axis] for axis in order], 0xBADBADBADBADBAD, dtype=np.uint64)
    return memory.transpose([order.index(axis) for axis in "LBHN"])


def as_kv_caches(
    memory: oracle.Slots, names: list[str], *, kernel_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    """The same memory as vLLM hands it over: a layer's `[block, head, token, content]` of fp16.

    `kernel_tokens`: hand each block over as several kernel blocks of so many tokens (token-major layouts only).
    """
    assert isinstance(memory.base, np.ndarray)
    elements = torch.from_numpy(memory.base.reshape(-1).view(np.float16))
    num_layers, num_blocks, heads, block_tokens = memory.shape
    layer_stride, *strides = [stride // elements.element_size() for stride in memory.strides]
    if kernel_tokens is not None:
        ratio = block_tokens // kernel_tokens
        num_blocks, block_tokens, strides = num_blocks * ratio, kernel_tokens, [strides[0] // ratio, *strides[1:]]
    shape = (num_blocks, heads, block_tokens, oracle.SLOT_ELEMENTS)
    return {
        name: torch.as_strided(elements, shape, (*strides, 1), layer * layer_stride)
        for layer, name in enumerate(names[:num_layers])
    }


@dataclass
class State:
    """What the runner keeps of a request."""

    tokens: list[int]
    blocks: list[int]
    seed: int
    hashes: list[int] = field(default_factory=list)

    def hash_all(self) -> list[int]:
        self.hashes = oracle.chain(self.tokens, self.hashes[: len(self.tokens)], self.seed)
        return self.hashes

    def replace(self, tokens: list[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=False)) if a != b), None)
        self.hashes = self.hashes[: min(len(tokens), len(self.tokens)) if same is None else same]
        self.tokens = list(tokens)


AroundLayer: TypeAlias = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Pass:
    """Tokens `[start, stop)` of a request in one step: what its KV must be, and where, from its first token on."""

    req_id: str
    start: int
    stop: int
    expected: oracle.Slots
    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class Runner:
    """Model runner of one rank.

    Args:
        memory: its KV cache, `[layer, block, head, token]`.
        layers: numbers of its layers in the model.
        heads: global numbers of the KV heads that this rank holds.
        num_computed: counts, by request, the tokens computed here (shared by nobody).
    """

    def __init__(self, memory: oracle.Slots, layers: range, heads: range) -> None:
        self.memory = memory
        self._layers, self._heads = layers, heads
        self._block_tokens = memory.shape[3]
        self.states: dict[str, State] = {}
        self.num_computed: dict[str, int] = {}
        self.weights = 0

    def forward(self, scheduled: SchedulerOutput, around_layer: AroundLayer = nullcontext) -> ModelRunnerOutput:
        """Run the batch of one step, layer by layer; `around_layer(number)` is entered around each one's attention.

        Raises:
            WrongKV: a slot that a request attends to does not hold its prefix's KV.
        """
        starts = self._update(scheduled)
        batch = [self._prepare(req_id, starts[req_id], num) for req_id, num in scheduled.num_scheduled_tokens.items()]
        for number in range(len(self._layers)):
            with around_layer(number):
                for one in batch:
                    self._attend(number, one)
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        for one in batch:
            output.req_id_to_index[one.req_id] = len(output.req_ids)
            output.req_ids.append(one.req_id)
            output.sampled_token_ids.append(self._sample(one))
        return output

    def _update(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Take in new and changed requests as vLLM's runners do; return each one's number of computed tokens."""
        starts = {}
        for req_id in scheduled.finished_req_ids:
            self.states.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            if tokens is None:
                tokens = [0] * new.prompt_len  # prompt embeddings
            self.states[new.req_id] = State(list(tokens), list(new.block_ids[0]), self.seed_of(new))
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self.states[req_id]
            new_blocks = cached.new_block_ids[index]
            tokens = cached.all_token_ids.get(req_id)
            if req_id in cached.resumed_req_ids:
                assert new_blocks is not None and tokens is not None
                state.blocks = list(new_blocks[0])
                state.replace(tokens)
            else:
                state.blocks += new_blocks[0] if new_blocks is not None else []
                if tokens is not None and len(tokens) > len(state.tokens):
                    state.replace(tokens)
            starts[req_id] = cached.num_computed_tokens[index]
        return starts

    def seed_of(self, new: Any) -> int:
        """What KV depends on besides the tokens: weights and adapter."""
        return self.weights + (new.lora_request.lora_int_id << 20 if new.lora_request else 0)

    def _prepare(self, req_id: str, start: int, num_tokens: int) -> _Pass:
        state = self.states[req_id]
        stop = start + num_tokens
        assert stop <= len(state.tokens), f"{req_id}: scheduled to {stop}, knows {len(state.tokens)} tokens"
        expected = oracle.slots(state.hash_all()[:stop], self._layers, self._heads)
        position = np.arange(stop)
        blocks = np.array(state.blocks)[position // self._block_tokens]
        assert blocks.all(), f"{req_id}: its block table has the null block"
        return _Pass(req_id, start, stop, expected, blocks, position % self._block_tokens)

    def _attend(self, number: int, one: _Pass) -> None:
        """Write the KV of the scheduled tokens in one layer, and compare that of the tokens before."""
        start, expected = one.start, one.expected[:, number]
        found = self.memory[number, one.blocks[:start], :, one.places[:start]]
        if not np.array_equal(found, expected[:start]):
            wrong = np.argwhere((found != expected[:start]).any(axis=1))[:, 0]
            layer = self._layers[number]
            raise WrongKV(
                f"{one.req_id}: of {start} tokens attended to in layer {layer}, {wrong[:4].tolist()}.. are wrong"
            )
        self.memory[number, one.blocks[start:], :, one.places[start:]] = expected[start:]

    def _sample(self, one: _Pass) -> list[int]:
        state = self.states[one.req_id]
        self.num_computed[one.req_id] = self.num_computed.get(one.req_id, 0) + one.stop - one.start
        if one.stop < len(state.tokens):
            return []
        token = oracle.sample(state.hashes[one.stop - 1])
        state.tokens.append(token)
        return [token]
