"""Which states are stored (see :mod:`vllm_plugin.states`), and where prompts part that lack one there.

vLLM makes a state reusable at the end of a prompt, where it sees prompts part, and once in so many tokens where it is
told to, and says in the step that computes it which block holds it. vLLM asks whoever reads that block later to pin it.
Nothing is read later here, so nothing is pinned: the workers copy it aside right behind that step's forward pass,
before another step can write to it, and what is given away before that step vLLM itself withdraws.

Beside speculative decoding vLLM moves states from block to block once it knows which proposals were right, after they
are copied here. So only those of prompts are stored, and of steps that propose nothing for that request.

States are large, and each is as large as the next. So one is stored only if the tokens since the last one of its chain
are worth it (`state_budget`): in no chain are there more bytes of states than so many times those of its pages.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from mooncake_connector.config.schema import Config
from vllm_plugin.geometry import Geometry
from vllm_plugin.prefix.tracked import Tracked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StatePlanner:
    """See the module.

    Args:
        proposes: whether there is speculative decoding.
        spacing_tokens: a state is stored that is at least so far behind the last one.
    """

    def __init__(self, geometry: Geometry, config: Config, *, proposes: bool) -> None:
        self._proposes = proposes
        self._page_tokens = int(config.page_tokens)
        self._unit_tokens = geometry.unit_tokens(self._page_tokens)
        """Where a hit may end; a state that lies elsewhere is of no use."""
        self._groups = {group.index: at for at, group in enumerate(geometry.groups) if group.kind == "state"}
        """vLLM's number of a group -> its position."""
        self.spacing_tokens = _spacing(geometry, config.state_budget)
        self._last: dict[str, int] = {}
        """Request -> the token up to which its chain has a state, stored or hit."""

    @property
    def any(self) -> bool:
        """Whether the model keeps states."""
        return bool(self._groups)

    def completed(
        self, scheduled: SchedulerOutput, requests: Mapping[str, Tracked]
    ) -> Iterator[tuple[Tracked, int, int, int]]:
        """States that this step completes and that are stored: (request, group's position, last page, block)."""
        self._follow(scheduled)
        state = scheduled.kv_connector_block_state
        gone = {*(scheduled.preempted_req_ids or ()), *scheduled.finished_req_ids}
        for req_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            tracked = requests.get(req_id)
            if tracked is None or tracked.root is None or req_id in gone:
                continue
            if self._proposes:
                offers = self._certain(tracked.request, offers, scheduled)
            for num_tokens, blocks in self._worth(req_id, offers):
                for position, block_id in blocks.items():
                    yield tracked, position, num_tokens // self._page_tokens - 1, block_id

    def _certain(
        self, request: Request, offers: list[tuple[int, int, int]], scheduled: SchedulerOutput
    ) -> list[tuple[int, int, int]]:
        """Those that this step computes without proposals, as any prompt's."""
        if request.request_id in scheduled.scheduled_spec_decode_tokens:
            return []
        start, stop = request.num_computed_tokens, request.num_prompt_tokens
        return [offer for offer in offers if start < offer[2] <= stop]

    def _follow(self, scheduled: SchedulerOutput) -> None:
        for req_id in scheduled.finished_req_ids:
            self._last.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._last[new.req_id] = new.num_computed_tokens  # a hit goes on from a state
        cached = scheduled.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                self._last[req_id] = num_computed

    def _worth(self, req_id: str, offers: list[tuple[int, int, int]]) -> Iterator[tuple[int, dict[int, int]]]:
        """Boundaries of a request that are stored, with the block of each group: (tokens, position -> block)."""
        boundaries: dict[int, dict[int, int]] = defaultdict(dict)
        for index, block_id, num_tokens in offers:
            if index in self._groups and block_id:  # block 0 is vLLM's null block
                boundaries[num_tokens][self._groups[index]] = block_id
        for num_tokens, blocks in sorted(boundaries.items()):
            apart = num_tokens - self._last.get(req_id, 0)
            if len(blocks) < len(self._groups) or num_tokens % self._unit_tokens or apart < self.spacing_tokens:
                continue
            self._last[req_id] = num_tokens
            yield num_tokens, blocks

    def ask_for(self, tracked: Tracked) -> None:
        """Have vLLM keep a state where this prompt parts from one in the pool, which has its pages and no state there.

        vLLM does so by itself where its own cache has those pages. Without a state at that point no prompt that shares
        so much would ever be a hit: the only one stored lies inside the tokens that nobody shares.
        """
        if self._groups and tracked.junctions:
            junction = max(tracked.junctions) // self._unit_tokens * self._unit_tokens
            tracked.request.shared_prefix_boundary = max(tracked.request.shared_prefix_boundary, junction)


def _spacing(geometry: Geometry, state_budget: float) -> int:
    """Tokens whose pages are as large as `1 / state_budget` states of all groups."""
    token_nbytes = state_nbytes = 0
    for group in geometry.groups:
        nbytes = sum(group.page_format(shard, 1).nbytes for shard in group.shards())
        if group.kind == "state":
            state_nbytes += nbytes
        elif group.kind == "full":
            token_nbytes += nbytes
    return int(state_nbytes / (state_budget * max(token_nbytes, 1)))
