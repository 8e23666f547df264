"""The hooks that make SGLang know the transfer backend of our name, and the take-over of the name `mooncake`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
from sglang.srt.disaggregation.utils import TransferBackend

from sglang_backend import BACKEND
from sglang_backend.targets import Target

TAKEN_OVER = "mooncake"
_CONN = "sglang.srt.disaggregation.common.conn"
_taken_over: list[str] = []


def install(take_over: bool) -> None:
    """Make the name known to the command line and the enumeration; the hook of `TARGETS` gives its classes."""
    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([BACKEND])
    if BACKEND not in TransferBackend._value2member_map_:
        _add_member(TransferBackend, BACKEND.upper(), BACKEND)
    if take_over and TAKEN_OVER not in _taken_over:
        _taken_over.append(TAKEN_OVER)


def _add_member(enumeration: type[Enum], name: str, value: str) -> None:
    """SGLang's list of backends is an Enum, which knows no other way to grow."""
    member = object.__new__(enumeration)
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration  # type: ignore[attr-defined]
    enumeration._member_map_[name] = member
    enumeration._member_names_.append(name)
    enumeration._value2member_map_[value] = member


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


TARGETS = (
    Target("sglang.srt.disaggregation.utils.get_kv_class", ("transfer_backend", "class_type"), _give_class),
    Target("sglang.srt.arg_groups.choices.add_disagg_transfer_backend_choices", ("iterable",)),
    Target(
        f"{_CONN}.CommonKVManager.__init__",
        ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    ),
    Target(f"{_CONN}.CommonKVManager.register_to_bootstrap", ("self",)),
    Target(f"{_CONN}.CommonKVManager.try_ensure_parallel_info", ("self", "bootstrap_addr")),
    Target(f"{_CONN}.CommonKVManager.update_status", ("self", "bootstrap_room", "status")),
    Target(f"{_CONN}.CommonKVManager.record_failure", ("self", "bootstrap_room", "failure_reason")),
    Target(
        f"{_CONN}.CommonKVSender.__init__",
        ("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    ),
    Target(
        f"{_CONN}.CommonKVSender.send", ("self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event")
    ),
    Target(f"{_CONN}.CommonKVSender._poll_with_status", ("self", "check_status")),
    Target(f"{_CONN}.CommonKVReceiver.__init__", ("self", "mgr", "bootstrap_addr", "bootstrap_room")),
    Target(
        f"{_CONN}.CommonKVReceiver.send_metadata",
        (
            "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices",
        ),
    ),
    Target(
        f"{_CONN}.CommonKVReceiver._get_bootstrap_info_from_server",
        ("self", "prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    ),
    Target(f"{_CONN}.CommonKVReceiver._poll", ("self",)),
    Target(f"{_CONN}.CommonKVReceiver._clear", ("self",)),
)  # fmt: skip
