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
from running_states import RunningStates
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.outputs import ModelRunnerOutput


class WrongKV(AssertionError):
    """The cache does not hold what the request's own prefix gives."""


def kv_memory(num_layers: int, num_blocks: int, heads: int, block_tokens: int, layout: str) -> oracle.Slots:
    """KV cache `[layer, block, head, token]` of 64-bit slots, in a layout's order, full of rubbish."""
    sizes = {"L": num_layers, "B": num_blocks, "H": heads, "N": block_tokens}
    order = layout.removesuffix("C")
    memory = np.full([sizes[axis] for axis in order], 0xBADBADBADBADBAD, dtype=np.uint64)
    return memory.transpose([order.index(axis) for axis in "LBHN"])


def shared_memory(num_layers: int, num_blocks: int, page_nbytes: int) -> oracle.Slots:
    """KV cache of several groups, `[layer of a group, block, slot]`: as in vLLM a block is of one of them at a time."""
    return np.full((num_layers, num_blocks, page_nbytes // oracle.SLOT_NBYTES), 0xBADBADBADBADBAD, dtype=np.uint64)


def memory_of(shared: oracle.Slots, spec: KVCacheSpec) -> oracle.Slots:
    """What the layers of one group see of it: `[layer, block, head, token]`, of a state `[layer, block, slot]`."""
    if isinstance(spec, MambaSpec):
        return shared[:, :, : spec.state_content_size_bytes // oracle.SLOT_NBYTES]
    return shared.reshape(*shared.shape[:2], spec.num_kv_heads, spec.block_size)


def as_states(memory: oracle.Slots, names: list[str]) -> dict[str, torch.Tensor]:
    """A group's memory as vLLM hands it over: a layer's states are bytes `[block, 1, 1, byte]`, whatever is in them."""
    assert isinstance(memory.base, np.ndarray)
    nbytes = torch.from_numpy(memory.base.reshape(-1).view(np.int8))
    layer_stride, block_stride, _ = memory.strides
    content = memory.shape[2] * oracle.SLOT_NBYTES
    shape, strides = (memory.shape[1], 1, 1, content), (block_stride, content, content, 1)
    return {name: nbytes.as_strided(shape, strides, layer * layer_stride) for layer, name in enumerate(names)}


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
    """What the runner keeps of a request; its block tables are those of each group."""

    tokens: list[int]
    blocks: list[list[int]]
    seed: int
    hashes: list[int] = field(default_factory=list)
    running: dict[int, RunningStates] = field(default_factory=dict)
    """By block table, beside proposals."""

    def hash_all(self) -> list[int]:
        self.hashes = oracle.chain(self.tokens, self.hashes[: len(self.tokens)], self.seed)
        return self.hashes

    def replace(self, tokens: list[int]) -> None:
        same = next((i for i, (a, b) in enumerate(zip(tokens, self.tokens, strict=False)) if a != b), None)
        self.hashes = self.hashes[: min(len(tokens), len(self.tokens)) if same is None else same]
        self.tokens = list(tokens)


AroundLayer: TypeAlias = Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Group:
    """Layers of one kind, whose numbers in the model are `layers`.

    Args:
        memory: `[layer, block, head, token]`, of a state `[layer, block, slot]`.
        table: number of its block table; those of latents and of the indexer beside them have the same.
    """

    spec: KVCacheSpec
    memory: oracle.Slots
    layers: range
    table: int = 0

    @property
    def is_state(self) -> bool:
        return isinstance(self.spec, MambaSpec)

    @property
    def proposes(self) -> bool:
        """Whether it keeps a state after each of several tokens, some of which may turn out wrong."""
        return isinstance(self.spec, MambaSpec) and self.spec.num_speculative_blocks > 0

    @property
    def is_indexer(self) -> bool:
        return getattr(self.spec, "cache_role", None) is SparseCacheRole.INDEXER

    def first_attended(self, start: int) -> int:
        """The first token whose KV is looked at when tokens from `start` on are computed."""
        if isinstance(self.spec, SlidingWindowSpec):
            return max(0, start - self.spec.sliding_window + 1)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            return start // self.spec.attention_chunk_size * self.spec.attention_chunk_size
        return 0


@dataclass(frozen=True)
class _Part:
    """What a request's tokens of one step mean to a group: the KV that it must have from token `first` on, and where.

    Of a state there are two, that before the first token, unless it is the request's, and that after the last; beside
    proposals one after each of them.
    """

    first: int
    expected: oracle.Slots
    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Pass:
    """Tokens `[start, stop)` of a request in one step, the last ones of them proposed; `hashes` are of all."""

    req_id: str
    start: int
    stop: int
    parts: list[_Part]
    drafts: list[int]
    hashes: list[int]


class Runner:
    """Model runner of one rank.

    Args:
        memory: its KV cache, of all groups.
        groups: in vLLM's order.
        heads: global numbers of the KV heads that this rank holds.
        num_computed: counts, by request, the tokens computed here (shared by nobody).
    """

    def __init__(self, memory: oracle.Slots, groups: list[Group], heads: range) -> None:
        self.memory = memory
        self._groups, self._heads = groups, heads
        self._order = sorted(
            (layer, at, number) for at, group in enumerate(groups) for number, layer in enumerate(group.layers)
        )
        self.states: dict[str, State] = {}
        self.num_computed: dict[str, int] = {}
        self.weights = 0
        self._sampled: list[tuple[State, _Pass, int]] = []
        self._starts: dict[str, int] = {}
        """Tokens computed of each request before this step."""

    def forward(self, scheduled: SchedulerOutput, around_layer: AroundLayer = nullcontext) -> ModelRunnerOutput:
        """Run the batch of an updated step layer by layer; `around_layer(layer)` is entered around each attention.

        Raises:
            WrongKV: a slot that a request attends to does not hold its prefix's KV.
        """
        starts = self._starts
        drafts = scheduled.scheduled_spec_decode_tokens
        batch = [
            self._prepare(req_id, starts[req_id], num, drafts.get(req_id, []))
            for req_id, num in scheduled.num_scheduled_tokens.items()
        ]
        for layer, at, number in self._order:
            group = self._groups[at]
            with nullcontext() if group.is_state or group.is_indexer else around_layer(layer):
                for one in batch:
                    (self._recur if group.is_state else self._attend)(group, number, one, one.parts[at])
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        for one in batch:
            output.req_id_to_index[one.req_id] = len(output.req_ids)
            output.req_ids.append(one.req_id)
            output.sampled_token_ids.append(self._sample(one))
        return output

    def update(self, scheduled: SchedulerOutput) -> None:
        """Take in new and changed requests as vLLM's runners do, and zero and copy blocks."""
        starts: dict[str, int] = {}
        self._starts = starts
        self._zero(scheduled.new_block_ids_to_zero or [])
        for source, target in scheduled.kv_cache_block_copies or ():
            self.memory[:, target] = self.memory[:, source]
        for req_id in scheduled.finished_req_ids:
            self.states.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            if tokens is None:
                tokens = [0] * new.prompt_len  # prompt embeddings
            self.states[new.req_id] = State(list(tokens), [list(ids) for ids in new.block_ids], self.seed_of(new))
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self.states[req_id]
            new_blocks = cached.new_block_ids[index]
            tokens = cached.all_token_ids.get(req_id)
            if req_id in cached.resumed_req_ids:
                assert new_blocks is not None and tokens is not None
                state.blocks = [list(ids) for ids in new_blocks]
                state.running.clear()
                state.replace(tokens)
            else:
                for blocks, added in zip(state.blocks, new_blocks or [()] * len(state.blocks), strict=True):
                    blocks += added
                if tokens is not None and len(tokens) > len(state.tokens):
                    state.replace(tokens)
            starts[req_id] = cached.num_computed_tokens[index]

    def seed_of(self, new: Any) -> int:
        """What KV depends on besides the tokens: weights and adapter."""
        return self.weights + (new.lora_request.lora_int_id << 20 if new.lora_request else 0)

    def _prepare(self, req_id: str, start: int, num_tokens: int, drafts: list[int]) -> _Pass:
        state = self.states[req_id]
        stop = start + num_tokens
        known = len(state.tokens) + len(drafts)
        assert stop <= known, f"{req_id}: scheduled to {stop}, knows {known} tokens"
        assert not drafts or stop == known, f"{req_id}: {len(drafts)} tokens are proposed before what is known"
        hashes = oracle.chain([*state.tokens, *drafts], state.hash_all(), state.seed)[:stop]
        parts = [self._part(one, hashes, start, state, len(drafts)) for one in self._groups]
        for part in parts:
            assert part.blocks.all(), f"{req_id}: its block table has the null block"
        return _Pass(req_id, start, stop, parts, drafts, hashes)

    def _part(self, group: Group, hashes: list[int], start: int, state: State, num_drafts: int) -> _Part:
        stop, block_tokens, blocks = len(hashes), group.spec.block_size, state.blocks[group.table]
        if group.is_state:
            tokens = [start - 1, stop - 1] if start else [stop - 1]
            places = [token // block_tokens for token in tokens]
            if group.proposes:
                running = state.running.setdefault(group.table, RunningStates(group.memory, block_tokens))
                running.move(blocks, start, stop)
                tokens, places = map(list, zip(*running.places(start, stop, num_drafts), strict=True))
            slots = range(64 * self._heads.start, 64 * self._heads.start + group.memory.shape[2])
            expected = oracle.slots([hashes[at] for at in tokens], group.layers, slots)
            return _Part(start, expected, np.array(blocks)[places], np.zeros(len(places), np.int64))
        first = group.first_attended(start)
        position = np.arange(first, stop)
        heads = oracle.INDEXER if group.is_indexer else self._heads[: group.memory.shape[2]]  # some have fewer
        expected = oracle.slots(hashes[first:], group.layers, heads)
        return _Part(first, expected, np.array(blocks)[position // block_tokens], position % block_tokens)

    def _attend(self, group: Group, number: int, one: _Pass, part: _Part) -> None:
        """Write the KV of the scheduled tokens in one layer, and compare that of the tokens before."""
        known, expected = one.start - part.first, part.expected[:, number]
        found = group.memory[number, part.blocks[:known], :, part.places[:known]]
        if not np.array_equal(found, expected[:known]):
            wrong = part.first + np.argwhere((found != expected[:known]).any(axis=1))[:, 0]
            layer = group.layers[number]
            raise WrongKV(
                f"{one.req_id}: of {known} tokens attended to in layer {layer}, {wrong[:4].tolist()}.. are wrong"
            )
        group.memory[number, part.blocks[known:], :, part.places[known:]] = expected[known:]

    def _recur(self, group: Group, number: int, one: _Pass, part: _Part) -> None:
        """Compare the state after the tokens before, and write that after the scheduled ones."""
        known = min(one.start, 1)
        for at, (block, expected) in enumerate(zip(part.blocks, part.expected[:, number], strict=True)):
            if at < known and not np.array_equal(group.memory[number, block], expected):
                layer = group.layers[number]
                raise WrongKV(f"{one.req_id}: the state after {one.start} tokens in layer {layer} is wrong")
            if at >= known:
                group.memory[number, block] = expected

    def _zero(self, block_ids: list[int]) -> None:
        """What vLLM does to new blocks of attention where a state could have been in them."""
        if len(self._groups) > 1:
            self.memory[:, block_ids] = 0

    def _sample(self, one: _Pass) -> list[int]:
        state = self.states[one.req_id]
        self.num_computed[one.req_id] = self.num_computed.get(one.req_id, 0) + one.stop - one.start
        if one.stop < len(state.tokens):
            self._sampled.append((state, one, 0))
            return []
        sampled = [oracle.sample(one.hashes[len(state.tokens) - 1])]
        for draft in one.drafts:
            if draft != sampled[-1]:
                break
            sampled.append(oracle.sample(one.hashes[len(state.tokens) + len(sampled) - 1]))
        state.tokens += sampled
        self._sampled.append((state, one, len(sampled)))
        return sampled

    def end_step(self) -> None:
        """What follows when the tokens of the last step are known; the connector has had its turn before."""
        for state, one, num_sampled in self._sampled:
            for table, running in state.running.items():
                running.keep(state.blocks[table], one.stop - len(one.drafts), num_sampled)
        self._sampled.clear()
