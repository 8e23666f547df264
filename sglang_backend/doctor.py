"""What `mooncake-connector doctor sglang` looks at: SGLang as it would start in this environment, but not started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from mooncake_connector import checks, quick_start
from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.config.sources import environ_name
from sglang_backend import BACKEND, KNOWN_VERSION

START = quick_start.SGLANG

_GROUP = "sglang.srt.plugins"
_WHITELIST = "SGLANG_PLUGINS"
_BESIDE_THE_INTERFACE = ("close",)


def run() -> Iterator[Check]:
    """The checks, in the order in which one follows from the other; importing SGLang takes some seconds."""
    try:
        import sglang
        from sglang.srt.plugins import load_plugins
    except Exception as error:
        yield checks.not_imported("SGLang", "sglang", error)
        return
    try:
        from sglang_backend import plugin, targets
        from sglang_backend.pd import offer, prompts
    except Exception as error:
        yield failed("hooks", f"SGLang {sglang.__version__} cannot be hooked: {type(error).__name__}: {error}")
        return
    yield checks.version("SGLang", sglang.__version__, KNOWN_VERSION)
    misfits = {what: targets.misfits(of) for what, of in (("hooks", plugin.TARGETS), ("PD hooks", offer.TARGETS))}
    for what, found in misfits.items():
        yield from (failed(what, f"{misfit}; install sglang=={KNOWN_VERSION}") for misfit in found)
    whitelist = [name.strip() for name in os.environ.get(_WHITELIST, "").split(",") if name.strip()]
    entry = checks.entry_point(_GROUP, BACKEND, "sglang_backend:register", whitelist or None, _WHITELIST)
    yield entry
    if entry.status is checks.Verdict.FAILED:
        return
    load_plugins()
    if not misfits["hooks"]:
        yield _hooks("hooks", targets.in_force(plugin.TARGETS), len(plugin.TARGETS))
        yield _name("name", "--hicache-storage-backend")
        yield _backend()
        yield _take_over(plugin.TAKEN_OVER)
    if not misfits["PD hooks"]:
        yield _hooks("PD hooks", targets.in_force(offer.TARGETS), len(offer.TARGETS))
        yield _name("PD name", "--disaggregation-transfer-backend")
        yield _transfer_backend("PD backend", BACKEND)
        yield _transfer_take_over(offer.TAKEN_OVER)
        yield _prompts(targets.misfits(prompts.TARGETS), targets.in_force(prompts.TARGETS), len(prompts.TARGETS))


def _hooks(what: str, in_force: bool, targets: int) -> Check:
    if in_force:
        return ok(what, f"in force; all {targets} parts of SGLang that they rest on are as known")
    return failed(what, "not in force although all fit; SGLang's log (stderr) says why")


def _prompts(misfits: list[str], in_force: bool, targets: int) -> Check:
    if misfits:
        return warning("PD prompts", f"prefill and decode do not compare them: {'; '.join(misfits)}")
    return _hooks("PD prompts", in_force, targets)


def _name(what: str, option: str) -> Check:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    try:
        parser.parse_args(["--model-path", "MODEL", option, BACKEND])
    except argparse.ArgumentError as error:
        return failed(what, f"SGLang's command line refuses it: {error}")
    return ok(what, f"{option} {BACKEND}")


def _backend() -> Check:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    try:
        backend = StorageBackendFactory._registry[BACKEND]["loader"]()
    except Exception as error:
        return failed("backend", f"SGLang's factory cannot load it: {type(error).__name__}: {error}")
    return checks.interface("backend", backend, beside=_BESIDE_THE_INTERFACE)


def _take_over(name: str) -> Check:
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    entry = StorageBackendFactory._registry[name]
    variable = environ_name("sglang_takeover")
    if entry["module_path"].startswith("sglang_backend."):
        return ok("take-over", f"on: {name!r} is mooncake-connector as well; unset {variable} to get SGLang's own back")
    return ok("take-over", f"off: {name!r} is SGLang's own; {variable}=1 would make it mooncake-connector")


def _transfer_backend(what: str, name: str) -> Check:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    from sglang_backend.pd import offer

    try:
        ours = offer.classes()
        given = {kind: get_kv_class(TransferBackend(name), KVClassType(kind)) for kind in ours}
    except Exception as error:
        return failed(what, f"SGLang cannot load it: {type(error).__name__}: {error}")
    if given != ours:
        return failed(what, f"SGLang gives {given['manager'].__module__} instead; another plugin may have its hook")
    return ok(what, ", ".join(each.__name__ for each in ours.values()))


def _transfer_take_over(name: str) -> Check:
    from sglang_backend.pd import offer

    if name in offer._taken_over:
        return _transfer_backend("PD take-over", name)
    return ok("PD take-over", f"off: {name!r} is SGLang's own; {environ_name('sglang_takeover')}=1 would change that")
