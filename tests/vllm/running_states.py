"""Where vLLM has the states of a request beside speculative decoding (`vllm/v1/worker/mamba_utils.py`, mode "align").

A step with proposals leaves a state after each of its last tokens, in as many blocks in a row: which of them the next
one goes on from is known when it is known how many tokens were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import oracle


@dataclass
class RunningStates:
    """Of one request and group.

    Args:
        memory: the group's, `[layer, block, slot]`.
        block_tokens: tokens a block.
        window: place in the block table of the first of these blocks; None before the first step.
        accepted: the state to go on from is in so many-th of them.
    """

    memory: oracle.Slots
    block_tokens: int
    window: int | None = None
    accepted: int = 1

    def move(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Before a step of tokens `[start, stop)`: the state to go on from comes to the first block that it writes."""
        former = (start - 1) // self.block_tokens if self.window is None else self.window
        self.window = -(-stop // self.block_tokens) - 1
        if former not in (-1, self.window):
            self.memory[:, blocks[self.window]] = self.memory[:, blocks[former + self.accepted - 1]]
            self.accepted = 1

    def places(self, start: int, stop: int, num_drafts: int) -> list[tuple[int, int]]:
        """(Token, place in the block table) of the state that a step reads, if any, and of those that it writes."""
        assert self.window is not None
        read = [(start - 1, self.window + self.accepted - 1)] if start else []
        return [*read, *((stop - num_drafts - 1 + at, self.window + at) for at in range(num_drafts + 1))]

    def keep(self, blocks: Sequence[int], running: int, num_sampled: int) -> None:
        """After a step: where what was right passes the end of a block, that block gets the state there.

        Args:
            running: tokens that were known before the step and are computed now.
        """
        assert self.window is not None
        self.accepted = max(num_sampled, 1)
        aligned = (running + self.accepted - 1) // self.block_tokens * self.block_tokens
        if aligned >= running:
            target = aligned // self.block_tokens - 1
            self.memory[:, blocks[target]] = self.memory[:, blocks[self.window + aligned - running]]
            self.accepted = 1 if target == self.window else self.accepted
