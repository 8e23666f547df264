"""The hooks that give SGLang a storage backend of our own name, and the take-over of the name `mooncake`. Those of the
transfer backend are in `pd/offer.py`.

SGLang's factory registers a class under any name, but decides by lists of known names who is constructed, what the
command line accepts, and who reads and writes the host pool without a copy. Each hook adds our name to one of these.
The hooks rest on parts of SGLang that promise nothing to others, so each target is compared with what it was in the
version this package knows; where one differs none is placed, since half of them would store wrong or stale pages.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import sglang
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins.hook_registry import HookType

from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.errors import ConfigError
from mooncake_connector.log import get_logger
from sglang_backend import BACKEND, BACKEND_CLASS, BACKEND_MODULE, KNOWN_VERSION, request_lines, speed
from sglang_backend.calls import our_backend
from sglang_backend.pd import offer, prompts
from sglang_backend.targets import Target, in_force, misfits, place

logger = get_logger(__name__)

TAKEN_OVER = "mooncake"
"""The in-tree backend whose name is ours after a take-over."""

_FINISHES_S = 5.0
"""How long a save may go on behind a flush."""
_OPTION = "--hicache-storage-backend"
_FACTORY = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def install() -> None:
    """Offer both backends of our name, or say in one error each why not. SGLang applies hooks after this returns."""
    _offer("storage backend", TARGETS, _offer_storage)
    _offer("transfer backend", offer.TARGETS, offer.install)
    _compare_prompts()
    _log_requests()
    _measure_prefill()


def _offer(what: str, targets: Sequence[Target], install: Callable[[bool], None]) -> None:
    found = misfits(targets)
    if found:
        logger.error(
            "SGLang %s does not work with this mooncake-connector; the %s %r is NOT offered: %s; install "
            "sglang==%s, or a mooncake-connector for this SGLang",
            sglang.__version__, what, BACKEND, "; ".join(found), KNOWN_VERSION,
        )  # fmt: skip
        return
    if sglang.__version__.partition("+")[0] != KNOWN_VERSION:  # "+cu130" and the like do not matter
        logger.error(
            "the %s %r is offered, but untested with SGLang %s: this mooncake-connector was tested with SGLang %s",
            what, BACKEND, sglang.__version__, KNOWN_VERSION,
        )  # fmt: skip
    place(targets)
    install(takes_over())


def _compare_prompts() -> None:
    """Whether the transfer backend is offered or not; each side takes its part where it can."""
    if found := misfits(prompts.TARGETS):
        logger.warning(
            "prefill and decode do not compare prompts in SGLang %s: %s; of two requests that are given one room, "
            "one may get the KV of the other, and no transfer has a line of its own",
            sglang.__version__, "; ".join(found),
        )  # fmt: skip
    else:
        place(prompts.TARGETS)


def _log_requests() -> None:
    """Where `log_requests` is set in the configuration of a backend, which is read when that is made."""
    if found := misfits(request_lines.TARGETS):
        logger.warning("no request has a line of its own in SGLang %s: %s", sglang.__version__, "; ".join(found))
    else:
        place(request_lines.TARGETS)


def _measure_prefill() -> None:
    if found := misfits(speed.TARGETS):
        logger.warning(
            "how fast SGLang %s prefills is not known, and prefill_seconds_saved stays 0: %s",
            sglang.__version__, "; ".join(found),
        )  # fmt: skip
    else:
        place(speed.TARGETS)


def _offer_storage(take_over: bool) -> None:
    if BACKEND not in StorageBackendFactory._registry:
        StorageBackendFactory.register_backend(BACKEND, BACKEND_MODULE, BACKEND_CLASS)
    if take_over:
        _take_over()


def hooked() -> bool:
    """Whether all hooks are in force in this process: the backend then hears of weights changed at run time."""
    return in_force(TARGETS)


def takes_over() -> bool:
    """Whether the name `mooncake` shall mean our backend; not where the configuration cannot be used."""
    try:
        return load_config().sglang_takeover
    except ConfigError as error:
        logger.error("sglang_takeover is ignored, the backend %r is SGLang's own: %s", TAKEN_OVER, error)
        return False


def _take_over() -> None:
    StorageBackendFactory.register_backend(TAKEN_OVER, BACKEND_MODULE, BACKEND_CLASS)
    # SGLang starts Mooncake's transfer engine for a backend of this name, and fails where that is not installed.
    os.environ.setdefault("SGLANG_HICACHE_MOONCAKE_REUSE_TE", "0")
    logger.warning(
        "SGLang's storage backend %r is mooncake-connector in this process (%s)",
        TAKEN_OVER, environ_name("sglang_takeover"),
    )  # fmt: skip


@contained(nothing)
def _accept_name(result: None, parser: argparse.ArgumentParser) -> None:
    """After `add_cli_args`: the command line accepts our name."""
    action = parser._option_string_actions[_OPTION]
    if action.choices is not None:
        action.choices = [*action.choices, BACKEND]  # a copy: the list is that of SGLang's declaration


def _construct(
    create: Callable[..., Any], factory: type, backend_name: str, backend_class: Any, storage_config: Any, pool: Any
) -> Any:
    """Around the factory's switch of names, which raises for ours."""
    if backend_name == BACKEND:
        return backend_class(storage_config, pool)
    return create(factory, backend_name, backend_class, storage_config, pool)


@contained(nothing)
def _suit(result: None, controller: Any, *args: Any, **kwargs: Any) -> None:
    """After an attachment: pages go between host pool and store directly, and a rank of each host stores what all hold.

    No request is under way meanwhile.
    """
    if our_backend(controller) is not None:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy
        from sglang_backend.writers import let_each_host_write

        let_each_host_write(controller)


@contained(nothing)
def _with_prefixes(attachment: Any, **knobs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before the knobs of storage are applied: a page comes with the keys before it, so the store knows its parent."""
    if our_backend(attachment._cache.cache_controller) is None:
        return None
    return (attachment,), {**knobs, "hicache_storage_pass_prefix_keys": True}


def _reports_weights(update: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around a weight update: also one that failed may have changed weights, and pages by them are no longer shared.

    After it, not before: pages by the old weights that are still on their way belong where they were going.
    """
    try:
        return update(manager, recv_req)
    finally:
        _weights_changed()


@contained(nothing)
def _weights_changed() -> None:
    from sglang_backend.weights import in_memory

    in_memory.changed()


def _reports_reset(check: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around a check of weights, one kind of which makes them up anew, so that an update can be seen to write all."""
    try:
        return check(manager, recv_req)
    finally:
        if recv_req.action == "reset_tensors":
            _weights_changed()


def _reports_loss(release: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around a release of memory: weights of which no copy is kept are anything until they are sent again."""
    try:
        return release(manager, recv_req)
    finally:
        _lost(recv_req)


@contained(nothing)
def _lost(recv_req: Any) -> None:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_server_args

    args, tags = get_server_args(), recv_req.tags or [GPU_MEMORY_TYPE_WEIGHTS]
    if GPU_MEMORY_TYPE_WEIGHTS in tags and args.enable_memory_saver and not args.enable_weights_cpu_backup:
        _weights_changed()


@contained(nothing)
def _empties_caches(flushed: bool, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang flushed its own caches, or refused to since requests are running."""
    from sglang_backend.weights import in_memory

    if flushed:
        in_memory.caches_emptied()


def _keeps_drafts(should_backup: Callable[..., bool], controller: Any, transfer: Any) -> bool:
    """Around the choice of what a rank of an MLA model stores beside rank 0: SGLang knows of Mooncake's keys alone."""
    return should_backup(controller, transfer) or _is_split_draft(controller, transfer)


@contained(lambda: False)
def _is_split_draft(controller: Any, transfer: Any) -> bool:
    """Whether each rank has other heads of this draft model's KV cache."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    if transfer.name not in ("draft", "draft_swa") or our_backend(controller) is None:
        return False
    entry = controller.mem_pool_host.entry_map.get(transfer.name)
    return entry is not None and isinstance(entry.host_pool, MHATokenToKVPoolHost)


def _watching(name: str, asking: Callable[[Any, threading.Event], Callable[[], bool]]) -> Callable[..., Any]:
    """A hook around what SGLang's threads do for a prompt, and go on with although nobody waits for it any more.

    Requests behind it would wait, and SGLang ends at a flush where these threads do not come back within 10 s. What
    `asking` makes, of SGLang's operation and its event, is what the backend asks, by its `name`, whether to go on.
    """

    def watch(call: Callable[..., Any], controller: Any, operation: Any) -> Any:
        backend = our_backend(controller)
        if backend is None or threading.current_thread() is threading.main_thread():  # that one never waits
            return call(controller, operation)
        before = getattr(backend, name)
        setattr(backend, name, asking(operation, controller.storage_stop_event))
        try:
            return call(controller, operation)
        finally:
            setattr(backend, name, before)

    return watch


def _hurries(stop: Callable[[Any], None], controller: Any) -> None:
    """Around the end of the thread that looks up for all stages of a pipeline: SGLang waits for it first, 10 s.

    `storage_stop_event` comes later, and must: the other threads of all ranks do together what this one gives them.
    """
    backend = our_backend(controller)
    if backend is None:
        return stop(controller)
    backend.hurried = True
    try:
        return stop(controller)
    finally:
        backend.hurried = False


def _until_given_up(operation: Any, stopped: threading.Event) -> Callable[[], bool]:
    """A lookup or a load, of a prompt that may be aborted or take too long."""
    return lambda: not (operation.is_terminated() or stopped.is_set())


def _for_a_while(operation: Any, stopped: threading.Event) -> Callable[[], bool]:
    """A save, which a flush lets go on for a while: it looks whether to stop when it has all of a piece of a prompt."""
    stops_s = math.inf

    def goes_on() -> bool:
        nonlocal stops_s
        if stopped.is_set():
            stops_s = min(stops_s, time.monotonic() + _FINISHES_S)
        return time.monotonic() < stops_s

    return goes_on


@contained(nothing)
def _notes_files(result: None, runner: Any) -> None:
    """After a model was loaded: a backend that is attached much later hashes the files, which may be others by then."""
    from sglang_backend.identity import loaded_files

    loaded_files.note(is_draft=runner.is_draft_worker)


@contained(nothing)
def _notes_adapters(result: None, runner: Any) -> None:
    """After those that the server starts with were loaded: after the model, and their download may end meanwhile."""
    from sglang_backend.identity import loaded_files

    loaded_files.note_adapters()


_MANAGER_CALL = ("self", "recv_req")

TARGETS = (
    Target(f"{_FACTORY}.register_backend", ("name", "module_path", "class_name")),
    Target(
        f"{_FACTORY}._create_builtin_backend",
        ("backend_name", "backend_class", "storage_config", "mem_pool_host"),
        _construct,
    ),
    Target("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",), _accept_name, HookType.AFTER),
    Target(
        f"{_CONTROLLER}.attach_storage_backend",
        ("self", "storage_backend", "prefetch_threshold", "model_name", "storage_backend_extra_config"),
        _suit,
        HookType.AFTER,
    ),
    Target(f"{_CONTROLLER}._page_get_zero_copy", ("self", "operation", "hash_values", "host_indices", "extra_info")),
    Target(f"{_CONTROLLER}._page_set_zero_copy", ("self", "hash_values", "host_indices", "extra_info")),
    Target(f"{_HYBRID}.should_backup", ("self", "transfer"), _keeps_drafts),
    Target(f"{_HYBRID}._storage_hit_query", ("self", "operation"), _watching("asked", _until_given_up)),
    Target(f"{_HYBRID}._stop_pp_prefetch_thread", ("self",), _hurries),
    Target(f"{_HYBRID}._page_transfer", ("self", "operation"), _watching("wanted", _until_given_up)),
    Target(f"{_HYBRID}._page_backup", ("self", "operation"), _watching("kept", _for_a_while)),
    Target(
        "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment.apply_runtime_config",
        (
            "self", "storage_backend", "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
            "hicache_storage_pass_prefix_keys", "enable_storage", "enable_storage_metrics", "extra_metric_labels",
        ),
        _with_prefixes,
        HookType.BEFORE,
    ),
    Target(f"{_RUNNER}.load_model", ("self",), _notes_files, HookType.AFTER),
    Target(f"{_RUNNER}.init_lora_manager", ("self",), _notes_adapters, HookType.AFTER),
    Target(f"{_WEIGHTS}.update_weights_from_disk", _MANAGER_CALL, _reports_weights),
    Target(f"{_WEIGHTS}.update_weights_from_distributed", _MANAGER_CALL, _reports_weights),
    Target(f"{_WEIGHTS}.update_weights_from_tensor", _MANAGER_CALL, _reports_weights),
    Target(f"{_WEIGHTS}.update_weights_from_ipc", _MANAGER_CALL, _reports_weights),
    # Weights may also be written from outside, by RDMA, between the beginning and the end of an update.
    Target(f"{_WEIGHTS}.begin_weight_update", _MANAGER_CALL, _reports_weights),
    Target(f"{_WEIGHTS}.end_weight_update", _MANAGER_CALL, _reports_weights),
    Target(f"{_WEIGHTS}.check_weights", _MANAGER_CALL, _reports_reset),
    Target(f"{_WEIGHTS}.release_memory_occupation", _MANAGER_CALL, _reports_loss),
    Target(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache", ("self", "empty_cache"), _empties_caches, HookType.AFTER
    ),
)  # fmt: skip
