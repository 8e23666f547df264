"""SGLang's KV manager of one rank, on a `transfer` node: what SGLang's sender and receiver of each request stand on.

SGLang's own classes keep the state of requests (`request_status`, `failure_records`), talk to its bootstrap server and
answer its scheduler; they are kept as they are. Their sockets, heartbeats and messages between ranks are not used: the
ranks of the other side are found through the prefill instance's directory, of which the bootstrap server's row says
where it listens.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import (
    get_device,
    get_disagg,
    get_exec,
    get_memory,
    get_observability,
    get_parallel,
    get_server_args,
)

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.checkpoint import weights_digest
from mooncake_connector.kv.namespace import canonical_json
from mooncake_connector.log import get_logger, kind_of, log_once
from sglang_backend.metrics import TransferMetrics
from sglang_backend.pd import prompts
from sglang_backend.pd.asking import Asking
from sglang_backend.pd.aux_rows import AuxRows
from sglang_backend.pd.layout import Place, RankMemory
from sglang_backend.pd.lines import TransferLines
from sglang_backend.speed import steps
from sglang_backend.targets import in_force
from transfer.control.connection import Access
from transfer.control.directory import THIS_HOST, Address, Directory, RankCard
from transfer.device_order import DeviceOrder, Wait
from transfer.protocol.incoming import Incoming
from transfer.protocol.orders import Ended, Ending, Failed
from transfer.protocol.outgoing import Outgoing
from transfer.session import Node, NodeOptions

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs

_FORMAT = 1
"""Of what both sides make of SGLang's memory: sections, their names and tables."""
_PATIENCE_S, _IMPATIENT_S = 0.2, 5.0
"""The scheduler waits so long for a bootstrap server it meets first, and asks again later. Where it has waited for
nothing it does not wait for any for a while: requests may name as many as they like."""
_GIVE_WAY_S = 0.001
_IDLE_PASS_S = 0.002
"""A pass of the scheduler's loop that is over sooner, and ended no step, has computed nothing. A step may be as short
on a GPU, and one that takes longer may be under way."""
_GONE_S = 0.1
"""A room that does not ask for so long has ended; another one waits from then on."""

logger = get_logger(__name__)


class Party(Protocol):
    """The sender or the receiver of one request."""

    def settled(self, report: Failed | Ended) -> None:
        """Its transfer has ended, or nothing will come of it."""


class MooncakeConnectorKVManager(CommonKVManager):
    """See the module.

    Raises:
        ConfigError, TransferError, ValueError: SGLang cannot start like this; each says what to change.
    """

    supports_deferred_decode_kv_release = True
    """SGLang asks `is_abort_release_safe` for pages of requests that failed, for 30 s, and does not wait meanwhile."""

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        _refuse_what_is_not_served(args, disaggregation_mode)
        self._parties: dict[Outgoing | Incoming, Party] = {}
        self._given_up: list[tuple[int, Incoming]] = []
        self._waiting_room, self._waited_s, self._waited_steps, self._patient_from_s = -1, 0.0, 0, 0.0
        self.asking = Asking()
        self.metrics = TransferMetrics(enabled=get_observability().enable_metrics)
        self._is_started = False
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # nothing is read from it
        if disaggregation_mode == DisaggregationMode.DECODE:
            self._start()

    def register_to_bootstrap(self) -> None:
        """Have the row of this rank say where the instance's directory is."""
        self._start()
        host, port = self.home
        self.local_ip, self.rank_port = host or THIS_HOST, port
        super().register_to_bootstrap()

    def _start(self) -> None:
        """Open the node of this rank, and on the first rank the directory of them all."""
        if self._is_started:
            return
        self._is_started = True
        config = load_config()
        parallel = get_parallel()
        model = ModelConfig.from_server_args(get_server_args())
        tp_rank = self.kv_args.engine_rank % self.attn_tp_size
        is_first_rank = tp_rank == 0 and self.pp_rank == 0
        self.lines = TransferLines(enabled=config.log_requests and is_first_rank and in_force(prompts.TARGETS))
        place = Place(
            tp_rank=tp_rank,
            tp_size=self.attn_tp_size,
            num_layers=max(model.num_attention_layers, 1),
            num_heads=1 if self.is_mla_backend else model.get_total_num_kv_heads(),
            is_mla=bool(self.is_mla_backend),
            stage=self.pp_rank,
            num_stages=self.pp_size,
            first_layer=self.kv_args.prefill_start_layer if self.pp_size > 1 else 0,
        )
        device = torch.device(get_device().device)
        self.aux: AuxRows | None = None
        """Where KV is on a device."""
        if device.type != "cpu":
            device = torch.device(device.type, get_device().gpu_id)
            buffers = self.kv_args.aux_data_ptrs, self.kv_args.aux_data_lens, self.kv_args.aux_item_lens
            # SGLang's own streams are of the other priority: torch gives one of 32 to several who ask.
            self.aux = AuxRows(*buffers, device, torch.cuda.Stream(device, priority=-1))
        self.memory = RankMemory(self.kv_args, place, None if self.aux is None else self.aux.addresses)
        if self.memory.covers_tokens and get_disagg().disaggregation_decode_enable_radix_cache:
            raise ValueError(
                "--disaggregation-decode-enable-radix-cache does not work with this model: both sides would count its "
                "state from different tokens; unset it"
            )
        self.device = device
        self.order = DeviceOrder(partial(_record, device))
        access = Access.configured(config, self._compatibility(config, model))
        options = replace(NodeOptions.configured(config), names_return=True)  # rooms, after a request was retracted
        number = None if device.type == "cpu" else device.index
        self.node = Node(self.memory.layout, self.memory.regions, access, options, number)
        self._directory: Directory | None = None
        cards = self._of_all(msgspec.msgpack.encode(self.node.card))
        numbers = [number for number, (dp_rank, _) in enumerate(cards) if dp_rank == self.attn_dp_rank]
        ranks = [msgspec.msgpack.decode(cards[number][1], type=RankCard) for number in numbers]
        is_first = ranks[0].instance == self.node.card.instance
        if is_first:
            port = config.transfer_port + max(self.attn_dp_rank, self.system_dp_rank) if config.transfer_port else 0
            engine_id = self.node.card.instance.hex()
            self._directory = Directory(engine_id, ranks, len(ranks), (ranks[0].host, port), access)
        ports = self._of_all(self._directory.port if self._directory is not None else 0)
        port = next(port for dp_rank, port in ports if dp_rank == self.attn_dp_rank and port)
        self.home: Address = ranks[0].host or THIS_HOST, port
        if parallel.tp_rank == 0:
            seen = f"{self.home[0]}, port" if ranks[0].host else "this host only (Unix sockets of this user), number"
            logger.info(
                "SGLang %s hands KV over by mooncake-connector; its directory: %s %d; sections: %s",
                self.disaggregation_mode.value, seen, port,
                "; ".join(section.describe() for section in self.memory.layout.sections),
            )  # fmt: skip

    def _of_all(self, mine: Any) -> list[tuple[int, Any]]:
        """What every rank gives, with its data-parallel rank."""
        pair, world = (self.attn_dp_rank, mine), get_parallel().world_group
        return [pair] if world.world_size == 1 else world.all_gather_object(pair)

    def _compatibility(self, config: Config, model: ModelConfig) -> bytes:
        """Digest of what must be equal for KV to mean the same: the weights, above all."""
        args = get_server_args()
        digest = config.model_id or ""
        if not digest:
            mine = ""
            if get_parallel().world_group.rank_in_group == 0:
                try:
                    mine = weights_digest(args.model_path, args.revision, "auto", args.download_dir)
                except ModelIdentityError as error:
                    logger.warning("prefill and decode are not compared by their weights: %s", error)
            digest = self._of_all(mine)[0][1]
        described = {
            "engine": "sglang", "format": _FORMAT, "model": digest, "architecture": str(model.hf_config.architectures),
            "kv_dtype": str(self.kv_cache_dtype_str), "kv_layout": str(self.kv_layout),
            "swa_layout": str(self.kv_args.swa_kv_cache_layout),
        }  # fmt: skip
        return hashlib.sha256(canonical_json(described).encode()).digest()

    # Requests

    def until_computed(self, early: Any) -> Wait | None:
        """What waits until the KV is there that SGLang says to send now; None for all that the device was given.

        SGLang sends a chunk once its own stream has seen the result, and gives an event (`early`) with a prefix that a
        step under way may still write. The step after it is on the device by then, and is not to be waited for. In a
        pipeline SGLang sends what is still being computed.
        """
        if self.device.type == "cpu" or self.pp_size > 1:
            return None
        reached = torch.cuda.Event(blocking=True)
        reached.record()

        def wait() -> None:
            torch.cuda.set_device(self.device)
            reached.synchronize()
            if early is not None:
                early.synchronize()

        return wait

    def watch(self, transfer: Outgoing | Incoming, party: Party) -> None:
        self._parties[transfer] = party

    def collect(self) -> None:
        """Tell senders and receivers what became of their transfers since the last call."""
        self.metrics.count_each(self.node.take_counts())
        for report in self.node.take_ended():
            transfer = report.transfer
            if isinstance(report, Ended):
                party = self._parties.pop(transfer, None)
                self.metrics.ended(transfer)
                _say(transfer)
            else:
                party = self._parties.get(transfer)
            if party is not None:
                party.settled(report)

    def give_way(self, room: int) -> None:
        """Leave the processor to who computes, while the scheduler has nothing to do but to ask.

        SGLang's loop does not wait for transfers: a decode instance would take a whole core from the prefill instance
        beside it, and the interpreter from its own threads that receive. In each pass one room waits, for all.
        """
        now_s = time.monotonic()
        if room != self._waiting_room and now_s - self._waited_s < _GONE_S:
            return
        is_idle = steps.ended == self._waited_steps and now_s - self._waited_s < _IDLE_PASS_S
        if room == self._waiting_room and is_idle:
            time.sleep(_GIVE_WAY_S)
        self._waiting_room, self._waited_s, self._waited_steps = room, time.monotonic(), steps.ended

    def unwatch(self, transfer: Outgoing | Incoming) -> None:
        self._parties.pop(transfer, None)

    def give_up(self, room: int, transfer: Incoming) -> None:
        """SGLang is through with a request of this room, to whose pages may still be written."""
        self._given_up.append((room, transfer))

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing can write any more to pages of requests of this room that were given up."""
        self._given_up = [(room, transfer) for room, transfer in self._given_up if not transfer.is_over]
        return bootstrap_room not in [room for room, _ in self._given_up]

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """As SGLang's, but it never holds the scheduler up for long, and never ends it over another instance."""
        if bootstrap_addr not in self.prefill_info_table:
            find = partial(self._find_info, bootstrap_addr)
            asked, now_s = self.asking.ask(bootstrap_addr, bootstrap_addr, find), time.monotonic()
            if now_s >= self._patient_from_s and wait([asked], _PATIENCE_S).not_done:
                self._patient_from_s = now_s + _IMPATIENT_S
        return bootstrap_addr in self.prefill_info_table

    def _find_info(self, bootstrap_addr: str) -> None:
        """In a thread of ours. Requests for an instance that does not fit fail at once: it will not fit later."""
        try:
            super().try_ensure_parallel_info(bootstrap_addr)
        except Exception as error:  # page sizes, dtypes or ranks that do not fit
            reason = str(error) or repr(error)
            log_once(f"pd.refused:{kind_of(reason)}", "prefill instance %s: %s", bootstrap_addr, reason, logger=logger)
            self.metrics.failed("fetch", "refused")
            for room in list(self.addr_to_rooms_tracker.get(bootstrap_addr, ())):
                if self.request_status.get(room) == KVPoll.Bootstrapping:
                    self.record_failure(room, reason)
                    self.update_status(room, KVPoll.Failed)

    def forget(self, bootstrap_addr: str) -> None:
        """Ask its bootstrap server again before the next request: the instance may be another by then."""
        self.prefill_info_table.pop(bootstrap_addr, None)

    def teardown(self) -> None:
        self.asking.close()
        self.order.close()
        self.node.close()
        if self._directory is not None:
            self._directory.close()


class MooncakeConnectorKVBootstrapServer(CommonKVBootstrapServer):
    """SGLang's own: whoever reaches its port learns where directories are, which take no stranger in."""


def _record(device: torch.device) -> Wait | None:
    """What waits until the device has done all that was queued on any of its streams; None for the processor."""
    if device.type == "cpu":
        return None

    def wait() -> None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)

    return wait


def _say(transfer: Outgoing | Incoming) -> None:
    if transfer.ending in (Ending.FAILED, Ending.EXPIRED):
        kind = "send" if isinstance(transfer, Outgoing) else "fetch"
        said = "a transfer failed after %.3f s: %s (logged once per cause)"
        log_once(f"pd.{kind}:{kind_of(transfer.cause)}", said, transfer.seconds, transfer.cause, logger=logger)


def _refuse_what_is_not_served(args: KVArgs, mode: DisaggregationMode) -> None:
    """Raises ValueError for settings with which KV would be read or written in ways that are not known here."""
    parallel, disagg = get_parallel(), get_disagg()
    device = str(get_device().device)
    wrong = {
        f"--device {device}: KV is handed over in the memory of the host or of CUDA devices":
            torch.device(device).type not in ("cpu", "cuda"),
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": bool(envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.get()),
        "--pp-size above 1 on a decode instance: its stages do not compare which transfers failed":
            parallel.pp_size > 1 and mode == DisaggregationMode.DECODE,
        "--pp-size above 1 for a model with state beside its KV, or with a draft model":
            parallel.pp_size > 1 and bool(args.state_types or args.num_draft_entries),
        "attention context parallelism": parallel.attn_cp_size > 1,
        "decode context parallelism (--dcp-size)": parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "--disaggregation-decode-allocation-policy prefill_complete":
            disagg.disaggregation_decode_allocation_policy == "prefill_complete",
        "--disaggregation-enable-kv-checksum (pages have checksums here)": disagg.disaggregation_enable_kv_checksum,
        "--enable-unified-memory": get_memory().enable_unified_memory,
        "--enable-hisparse": get_memory().enable_hisparse,
        "--enable-memory-saver on a device": device != "cpu" and get_exec().features.enable_memory_saver,
        "--enable-pd-role-switch": disagg.enable_pd_role_switch,
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
    }  # fmt: skip
    found = [setting for setting, is_set in wrong.items() if is_set]
    if found:
        raise ValueError(
            f"--disaggregation-transfer-backend mooncake_connector does not work with {'; '.join(found)}: unset it, or "
            "choose another backend"
        )
