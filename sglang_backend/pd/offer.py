"""The hooks that make SGLang know the transfer backend of our name, and the take-over of the name `mooncake`.

Nothing of SGLang's disaggregation is imported before it was compared with what this package knows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from mooncake_connector.config.sources import environ_name
from mooncake_connector.log import get_logger
from sglang_backend import BACKEND
from sglang_backend.pd.pause import exchanging_first
from sglang_backend.pd.samples import with_own_rooms
from sglang_backend.targets import Target

logger = get_logger(__name__)

TAKEN_OVER = "mooncake"
_CHOICES = "sglang.srt.arg_groups.choices"
_UTILS = "sglang.srt.disaggregation.utils"
_CONN = "sglang.srt.disaggregation.common.conn"
_PREFILL = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_CHUNK_STEP = ("checkpoint_disagg_prefill", "tmp_end_idx")
_taken_over: list[str] = []


def install(take_over: bool) -> None:
    """Make the name known to the command line and the enumeration; the hooks of `TARGETS` give its classes."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend

    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in TransferBackend._value2member_map_:
        _add_member(TransferBackend, BACKEND.upper(), BACKEND)
    if take_over and TAKEN_OVER not in _taken_over:
        _taken_over.append(TAKEN_OVER)
        logger.warning(
            "SGLang's transfer backend %r is mooncake-connector in this process (%s)",
            TAKEN_OVER, environ_name("sglang_takeover"),
        )  # fmt: skip


def _add_member(enumeration: type[Enum], name: str, value: str) -> None:
    """SGLang's list of backends is an Enum, which knows no other way to grow."""
    member = object.__new__(enumeration)
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration  # type: ignore[attr-defined]
    enumeration._member_map_[name] = member
    enumeration._member_names_.append(name)
    enumeration._value2member_map_[value] = member
    type.__setattr__(enumeration, name, member)  # an Enum's own refuses


def classes() -> dict[str, type]:
    """By the values of SGLang's `KVClassType`."""
    from sglang_backend.pd.manager import MooncakeConnectorKVBootstrapServer, MooncakeConnectorKVManager
    from sglang_backend.pd.requests import MooncakeConnectorKVReceiver, MooncakeConnectorKVSender

    return {
        "manager": MooncakeConnectorKVManager,
        "sender": MooncakeConnectorKVSender,
        "receiver": MooncakeConnectorKVReceiver,
        "bootstrap_server": MooncakeConnectorKVBootstrapServer,
    }


def _give_class(get: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Around SGLang's switch of backends, which raises for ours."""
    if transfer_backend.value in (BACKEND, *_taken_over) and class_type.value != "kvargs":
        return classes()[class_type.value]
    return get(transfer_backend, class_type)


def _start_engine(start: Callable[..., None], *, gpu_id: int) -> None:
    """Around the start of Mooncake's transfer engine: a KV that we hand over needs none, whatever else may."""
    from sglang.srt.runtime_context import get_disagg

    disagg = get_disagg()
    if disagg.disaggregation_transfer_backend not in _taken_over:
        start(gpu_id=gpu_id)
        return
    with disagg.override(disaggregation_transfer_backend=BACKEND):
        start(gpu_id=gpu_id)


def _is_chosen() -> bool:
    from sglang.srt.runtime_context import get_disagg

    return get_disagg().disaggregation_transfer_backend in (BACKEND, *_taken_over)


def _of_common(method: str, parameters: str = "", uses: str = "") -> Target:
    return Target(f"{_CONN}.{method}", ("self", *parameters.split()), names=tuple(uses.split()))


TARGETS = (
    Target(f"{_UTILS}.get_kv_class", ("transfer_backend", "class_type"), _give_class),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        ("self", "recv_req", "mm_input_error"),
        with_own_rooms(_is_chosen),
    ),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        ("self", "recv_req"),
        exchanging_first(_is_chosen),
        names=("mode", "chunked_req", "enable_overlap", "last_batch", "disaggregation_mode", "tmp_end_idx"),
    ),
    Target(f"{_PREFILL}.checkpoint_disagg_prefill", ("self", "req"), names=("checkpoint_kv_cache",)),
    Target(f"{_PREFILL}.process_prefill_chunk", ("self", "last_batch", "running_batch"), names=_CHUNK_STEP),
    # By then the KV has been computed, but for that of the prefix that comes with an event.
    Target(
        f"{_PREFILL}.maybe_send_cached_prefix_chunk",
        ("self", "req", "allow_send"),
        names=("_early_send_wait_event", "record", "forward_stream"),
    ),
    Target(
        f"{_PREFILL}.process_batch_result_disagg_prefill",
        ("self", "batch", "result"),
        names=("copy_done", "synchronize", "send_kv_chunk", "tmp_end_idx"),
    ),
    Target(f"{_UTILS}.TransferBackend._value2member_map_"),
    Target(f"{_CHOICES}.DISAGG_TRANSFER_BACKEND_CHOICES"),
    Target(f"{_CHOICES}.add_disagg_transfer_backend_choices", ("iterable",)),
    Target(
        "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
        ".maybe_init_shared_mooncake_transfer_engine",
        ("gpu_id",),
        _start_engine,
        names=("get_disagg", "disaggregation_transfer_backend"),
    ),
    _of_common(
        "CommonKVManager.__init__",
        "args disaggregation_mode server_args is_mla_backend",
        "kv_args kv_cache_dtype_str kv_layout is_mla_backend disaggregation_mode attn_tp_size attn_dp_rank local_ip "
        "rank_port server_socket request_status failure_records register_to_bootstrap prefill_info_table "
        "addr_to_rooms_tracker",
    ),
    _of_common("CommonKVManager.register_to_bootstrap", uses="local_ip rank_port"),
    _of_common("CommonKVManager.try_ensure_parallel_info", "bootstrap_addr", "prefill_info_table"),
    _of_common("CommonKVManager.update_status", "bootstrap_room status", "request_status"),
    _of_common("CommonKVManager.record_failure", "bootstrap_room failure_reason", "failure_records"),
    _of_common(
        "CommonKVSender.__init__",
        "mgr bootstrap_addr bootstrap_room req_has_disagg_prefill_dp_rank",
        "kv_mgr bootstrap_room aux_index conclude_state update_status _transfer_start_time _owns_bootstrap_room "
        "_early_send_wait_event",
    ),
    _of_common("CommonKVSender.init", "num_kv_indices aux_index", "num_kv_indices aux_index"),
    _of_common("CommonKVSender.send", "kv_indices state_indices num_kv_tokens indices_event"),
    _of_common("CommonKVSender._record_transfer_indices", "kv_indices state_indices"),
    _of_common("CommonKVSender._poll_with_status", "check_status", "conclude_state"),
    _of_common("CommonKVSender.clear", uses="request_status"),
    _of_common("CommonKVSender.failure_exception", uses="clear failure_records"),
    _of_common(
        "CommonKVReceiver.__init__",
        "mgr bootstrap_addr bootstrap_room",
        "kv_mgr bootstrap_room bootstrap_addr conclude_state init_time update_status _owns_bootstrap_room",
    ),
    _of_common(
        "CommonKVReceiver.send_metadata",
        "kv_indices aux_index state_indices decode_prefix_len destination device_kv_indices",
    ),
    _of_common(
        "CommonKVReceiver._get_bootstrap_info_from_server",
        "prefill_dp_rank prefill_cp_rank target_tp_rank target_pp_rank",
        "bootstrap_addr",
    ),
    _of_common("CommonKVReceiver._poll", uses="conclude_state check_status _check_waiting_timeout"),
    Target(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.pop_transferred",
        ("self", "rids_to_check"),
        names=("enable_deferred_decode_kv_release", "abort_notified", "ensure_abort_notified", "_defer_release"),
    ),
    Target(
        "sglang.srt.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases",
        ("self",),
        names=("is_abort_release_safe", "_do_release"),
    ),
    _of_common("CommonKVManager.is_abort_release_safe", "bootstrap_room required_acks"),
    _of_common("CommonKVReceiver.ensure_abort_notified", "force_arm", "abort_notified"),
    _of_common("CommonKVReceiver._clear", uses="_owns_bootstrap_room request_status"),
    _of_common("CommonKVReceiver.failure_exception", uses="clear failure_records"),
)
