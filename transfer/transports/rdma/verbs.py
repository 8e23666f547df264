"""The verbs library by way of its binding, the package `ibverbs`, which nothing else here imports.

It is loaded when a card is asked for, so that a process without one never has it.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import resource
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Unavailable

INSTALL_BINDING = "pip install 'mooncake-connector[rdma]'"
INSTALL_LIBRARY = "apt-get install libibverbs1 ibverbs-providers (or rdma-core)"
NO_LIMIT = "no limit"


def binding() -> ModuleType:
    """The package. Raises Unavailable with what is missing and how to get it."""
    if importlib.util.find_spec("ibverbs") is None:
        raise Unavailable(f"the package ibverbs is not installed: {INSTALL_BINDING}")
    try:
        return importlib.import_module("ibverbs")
    except ImportError as error:
        raise Unavailable(f"libibverbs cannot be loaded ({error}): {INSTALL_LIBRARY}") from error


def in_use() -> str:
    """What speaks to the cards, where `binding` gives it."""
    try:
        return f"libibverbs, by the package ibverbs {version('ibverbs')}"
    except PackageNotFoundError:  # it is there, and was not installed
        return "libibverbs, by the package ibverbs"


def locked_limit() -> str:
    """Of this process's memory, which must all be locked to be registered."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return NO_LIMIT if soft == resource.RLIM_INFINITY else f"at most {human_nbytes(soft)}"


def open_device(name: str) -> Any:
    """An `ibverbs.Context`. Raises Unavailable."""
    devices = _devices()
    if name not in devices:
        known = ", ".join(devices) or "none"
        raise Unavailable(
            f"the kernel has {name}, and libibverbs knows {known}: its driver is missing ({INSTALL_LIBRARY}), or in a "
            "container /dev/infiniband (docker run --device=/dev/infiniband)"
        )
    try:
        return devices[name].open()
    except OSError as error:
        raise Unavailable(
            f"{name} cannot be opened: {error.strerror or error}; who may use /dev/infiniband?"
        ) from error


def _devices() -> dict[str, Any]:
    try:
        return {device.name: device for device in binding().get_device_list()}
    except OSError as error:
        if error.errno == errno.ENOSYS:  # it has found no support in the kernel
            return {}
        raise Unavailable(f"libibverbs cannot list its devices: {error}") from error
