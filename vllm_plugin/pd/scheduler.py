"""The scheduler side of PD: which requests are outgoing or incoming, and until when blocks are held.

Runs inside vLLM's scheduler step: it decides by what it has been told, sends nothing and never waits. The workers'
nodes (`transfer.session`) do the rest; both sides of this speak of requests by vLLM's ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import RequestStatus

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Address, Directory, RankCard
from transfer.plan.layout import NO_BLOCK, Table
from transfer.serving import Computed
from transfer.transports.base import TransferError
from vllm_plugin.geometry import Geometry, Group
from vllm_plugin.messages import Announcement, PDStep, WorkerReport
from vllm_plugin.naming import named_tokens
from vllm_plugin.pd.params import PrefillRequest, answer_params, parse_params, transfer_name
from vllm_plugin.stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_WITHOUT_RESULT = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)
"""All other ends hand the KV over, also a first token that ends the text."""

logger = get_logger(__name__)


@dataclass(slots=True)
class _Outgoing:
    """A request whose KV another instance will want, until its end is known to vLLM."""

    request: Request
    name: str
    asked: PrefillRequest
    run: int = 0
    """How often its prefill was begun again."""
    computing: bool = False
    """Its blocks hold KV of its own, which may be on its way."""
    over: bool = False
    """vLLM has finished it; its blocks are held until all workers have reported."""


@dataclass(slots=True)
class _Incoming:
    """A request whose KV another instance has or computes; until it has been fetched, or cannot be."""

    name: str
    called: str = ""
    """What the prefill instance calls it, if it said so: another name where the prompt is another."""
    granted: bool = False


class PDScheduler:
    """See the module.

    Args:
        dp_rank: of this engine among data-parallel ones, each of which has a port of its own.
        stats: takes failures that no worker sees.
    """

    def __init__(
        self, geometry: Geometry, config: Config, engine_id: str, dp_rank: int, access: Access, stats: ConnectorStats
    ) -> None:
        self._geometry, self._config, self._engine_id, self._access = geometry, config, engine_id, access
        self._dp_rank, self._stats = dp_rank, stats
        self._computes_what_failed = config.transfer_failure == "recompute"
        """Otherwise a transfer that failed before its request has blocks is asked for all the same, to fail then."""
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._step = PDStep()
        self._cards: list[RankCard] = []
        self._directory: Directory | None = None
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def set_ranks(self, cards: Mapping[tuple[int, int], bytes]) -> None:
        """What the workers say of themselves, by (PP rank, TP rank): from now on others may ask the directory."""
        if self._directory is not None:  # of the time before the engine slept
            self._directory.close()
            self._directory, self._cards = None, []
        num_ranks = self._geometry.num_ranks
        if len(cards) != num_ranks:
            logger.warning("KV transfers are off: %d of %d ranks could set them up", len(cards), num_ranks)
            return
        self._cards = [msgspec.msgpack.decode(cards[rank], type=RankCard) for rank in sorted(cards)]
        port = self._config.transfer_port
        address = (self._cards[0].host, port + self._dp_rank if port else 0)
        try:
            self._directory = Directory(self._engine_id, self._cards, num_ranks, address, self._access)
        except TransferError as error:
            logger.error("KV transfers are off: %s", error)
            return
        seen = f"{address[0]}, port" if address[0] else f"{THIS_HOST} (Unix sockets of this user, no TCP port), port"
        logger.info(
            "other instances can fetch KV from instance %s at %s %d", self._engine_id, seen, self._directory.port
        )

    # Requests

    def track(self, request: Request, root: bytes | None, namespace: Namespace | None) -> None:
        """A new request: announce it or offer it, if its parameters say so.

        Args:
            root: its chain root, or None where its KV has no name.
            namespace: this instance's, or None while the model's identity is not known.
        """
        asked = parse_params(request.kv_transfer_params)
        if asked is None or request.request_id in self._outgoing or request.request_id in self._incoming:
            return
        if request.request_id in self._step.cancelled:
            # The workers hear of a step's requests by their ids, and would take this one for the one that ended.
            log_once("pd.again", "a request with the id of one that ended just now is prefilled here", logger=logger)
            return
        if self._directory is None:
            log_once(
                "pd.off", "a request with kv_transfer_params is prefilled here: KV transfers are off", logger=logger
            )
            return
        if root is None or namespace is None:
            reason = "it has prompt embeddings, streamed input, media without a hash or an unknown adapter"
            if namespace is None:
                reason = "who the model is, or which weights it has, is not known yet"
            log_once(f"pd.nameless:{reason}", "a request is prefilled here: %s", reason, logger=logger)
            return
        if self._geometry.is_hybrid and not _has_a_last_token(request):
            reason = "its prompt is one token, or is read to its end (prompt_logprobs)"
            log_once("pd.whole", "a request of a hybrid model is prefilled here: %s", reason, logger=logger)
            return
        name = transfer_name(asked.transfer_id, namespace, root, named_tokens(request, 0, request.num_prompt_tokens))
        same = self._outgoing if isinstance(asked, PrefillRequest) else self._incoming
        if any(other.name == name for other in same.values()):
            log_once("pd.twice", "a second request of transfer %s is prefilled here", asked.transfer_id, logger=logger)
        elif isinstance(asked, PrefillRequest):
            self._outgoing[request.request_id] = _Outgoing(request, name, asked)
            self._step.opened[request.request_id] = name
            if self._geometry.is_hybrid:
                _leave_last_token(request)
        else:
            self._incoming[request.request_id] = _Incoming(name, asked.name)
            self._step.announced[request.request_id] = Announcement(name, asked.where, asked.computed)
            if self._computes_what_failed and asked.name not in ("", name):
                reason = "the prefill instance had another prompt or other weights"
                log_once("pd.another", "a request is prefilled here: %s", reason, logger=logger)
                self._cancel_incoming(request.request_id, "the decode instance has another prompt or other weights")

    def gives_away(self, request: Request) -> bool:
        """Whether another instance will want the KV of a request."""
        return request.request_id in self._outgoing

    def expects(self, request: Request) -> bool:
        """Whether KV of a request is to come that has no blocks yet."""
        incoming = self._incoming.get(request.request_id)
        return incoming is not None and not incoming.granted

    def brings(self, request: Request) -> int:
        """Tokens of the prompt, the first ones, of which a transfer brings the KV.

        Of a hybrid model all but the last. The decode instance computes that one in any case, from windows and states
        as they are before it; after it they are others.
        """
        return request.num_prompt_tokens - self._geometry.is_hybrid

    def after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int, num_pooled: int) -> None:
        """Blocks were allocated for a request whose KV is expected.

        Args:
            num_external_tokens: tokens beyond the local hit that vLLM will wait for.
            num_pooled: of these, the first ones, which somebody else brings.
        """
        if not num_external_tokens:  # vLLM computes, or another connector loads
            self._cancel_incoming(request.request_id, "not needed")
            return
        self._incoming[request.request_id].granted = True
        assert request.kv_transfer_params is not None
        request.kv_transfer_params["do_remote_prefill"] = False  # one transfer a request
        stop = self.brings(request)
        first, block_ids = stop - num_external_tokens + num_pooled, blocks.get_block_ids()
        self._step.granted[request.request_id] = [
            _wanted(group, first, stop, block_ids[group.index]) for group in self._geometry.groups
        ]

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """vLLM is through with a request: whether its blocks are to be held, and what to tell the router."""
        if request.request_id in self._incoming:
            self._cancel_incoming(request.request_id, "the request ended")
        outgoing = self._outgoing.get(request.request_id)
        if outgoing is None:
            return False, None
        is_lost = self._directory is None  # since the engine slept
        if is_lost or request.status in _WITHOUT_RESULT or request.num_computed_tokens < request.num_prompt_tokens:
            # Also where no worker knows of it yet: a consumer may be waiting, and hears of it this way.
            cause = f"the request ended: {request.status.name.lower()}"
            if request.status not in _WITHOUT_RESULT and request.num_preemptions:
                self._stats.fail("send_preempted")
                hint = "a prefill instance needs kv_role kv_producer or kv_both"
                log_once("pd.preempted", "the KV of a preempted request was not sent: %s", hint, logger=logger)
            if not outgoing.computing:
                # Nothing is being sent. If something loads into its blocks, vLLM forgets the request when that ends,
                # and would end itself over a word about it after that.
                self._cancel_outgoing(request.request_id, cause)
                return False, None
            self._step.cancelled[request.request_id] = cause
            outgoing.over = True
            return True, None
        outgoing.over = True
        self._step.finished[request.request_id] = request.num_prompt_tokens
        answer = answer_params(
            outgoing.asked,
            name=outgoing.name,
            request_id=request.request_id,
            block_ids=block_ids,
            num_tokens=request.num_prompt_tokens,
            engine_id=self._engine_id,
            host=self._home[0],
            port=self._home[1],
            tp_size=self._geometry.tp_size,
            pp_size=self._geometry.pp_size,
        )
        return True, answer

    @property
    def _home(self) -> Address:
        """Where others, and this instance's workers, find its directory."""
        assert self._directory is not None
        return self._cards[0].host or THIS_HOST, self._directory.port

    def _cancel_incoming(self, req_id: str, cause: str) -> None:
        """Cancel a request whose KV was to come; one that was granted is reported once more."""
        incoming = self._incoming.pop(req_id)
        self._step.cancelled[req_id] = cause
        if not incoming.granted:
            self._step.unreported.add(req_id)
        announced = self._step.announced.get(req_id)
        if announced is not None and incoming.called:
            # Nothing will be fetched by any name, and the prefill instance releases what it knows by its own. vLLM says
            # by a request without the prompt that its server refused one.
            self._step.announced[req_id] = replace(announced, transfer=incoming.called)

    def _cancel_outgoing(self, req_id: str, cause: str) -> None:
        """Cancel what vLLM hears nothing more of."""
        del self._outgoing[req_id]
        self._step.cancelled[req_id] = cause
        self._step.unreported.add(req_id)

    def reset(self) -> None:
        """The weights were changed in memory: KV of the old ones is neither given away nor waited for any more.

        A request whose blocks are being fetched goes on with it, as one that runs does.
        """
        cause = "the weights were changed"
        self._step.cancelled |= {req_id: cause for req_id, outgoing in self._outgoing.items() if outgoing.over}
        self.forget([*self._incoming, *self._outgoing], cause)

    def forget(self, req_ids: Collection[str], cause: str) -> None:
        """KV of these requests is not what its name says: it is neither given away nor waited for any more, but where
        it is all there, or is being fetched."""
        for req_id in req_ids:
            incoming, outgoing = self._incoming.get(req_id), self._outgoing.get(req_id)
            if incoming is not None and not incoming.granted:
                self._cancel_incoming(req_id, cause)
            if outgoing is not None and not outgoing.over:
                if outgoing.computing:  # into blocks that may be another request's from the next step on
                    self._preempt(req_id, outgoing, self._step)
                self._cancel_outgoing(req_id, cause)

    # Steps

    @contained(PDStep)
    def build(self, scheduled: SchedulerOutput) -> PDStep:
        """What the workers have to know of this step."""
        step, self._step = self._step, PDStep()
        for req_id in scheduled.preempted_req_ids or ():
            if (outgoing := self._outgoing.get(req_id)) is not None:
                self._preempt(req_id, outgoing, step)
        if self._outgoing:
            for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
                outgoing = self._outgoing.get(req_id)
                if outgoing is not None and not outgoing.over:
                    outgoing.computing = True
                    self._add_progress(step, outgoing, num_tokens)
        if step.announced and self._directory is not None:  # else they fail
            step.home = self._home
        return step

    @staticmethod
    def _preempt(req_id: str, outgoing: _Outgoing, step: PDStep) -> None:
        outgoing.computing = False
        outgoing.run += 1
        step.preempted.append(req_id)

    @contained(nothing)
    def _add_progress(self, step: PDStep, outgoing: _Outgoing, num_tokens: int) -> None:
        assert self._manager is not None
        request = outgoing.request
        prompt_tokens = request.num_prompt_tokens
        if request.num_computed_tokens < prompt_tokens:
            block_ids = self._manager.get_block_ids(request.request_id)
            stop = min(request.num_computed_tokens + num_tokens, prompt_tokens)
            tables = [_held(group, stop, block_ids[group.index]) for group in self._geometry.groups]
            step.computed[request.request_id] = Computed(tables, stop, outgoing.run), prompt_tokens

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for req_id in report.failed_transfers:
                incoming = self._incoming.get(req_id)
                if incoming is not None and not incoming.granted and self._computes_what_failed:
                    self._cancel_incoming(req_id, "another rank could not fetch it")
        for req_id in output.finished_recving or ():
            self._incoming.pop(req_id, None)
        for req_id in output.finished_sending or ():
            self._outgoing.pop(req_id, None)

    def close(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()


def _wanted(group: Group, first: int, stop: int, block_ids: Sequence[int]) -> Table:
    """What of a group a request goes on from that has the KV of tokens before `first`, and wants that before `stop`."""
    if group.kind == "state":
        return Table(0, 1, [block_ids[(stop - 1) // group.block_tokens]])
    return Table(max(first, group.first_kept(stop)), stop, list(block_ids))


def _held(group: Group, stop: int, block_ids: Sequence[int]) -> list[int]:
    """The block table of a group's section with tokens before `stop` computed, of states the block with the last one.

    Without blocks that vLLM has taken back, as windows move on: it names its null block there.
    """
    if group.kind == "state":
        block_ids = [block_ids[(stop - 1) // group.block_tokens]]
    return [block_id or NO_BLOCK for block_id in block_ids]


def _has_a_last_token(request: Request) -> bool:
    """Whether it can be left to the decode instance."""
    return request.num_prompt_tokens > 1 and not request.get_skip_reading_prefix_cache()


def _leave_last_token(request: Request) -> None:
    """Have a prefill instance compute all but a prompt's last token, and stop there.

    With that one computed, windows would have moved on by a token and states be those after it. What vLLM samples then
    is of no use to anybody, as little as all else that a prefill instance samples.

    The list of the prompt is the caller's where the engine runs in its process: several samples of a prompt share it.
    """
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
