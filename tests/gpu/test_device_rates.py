"""How fast device memory is moved, beside a plain copy of the same bytes. Shown, not asserted."""

import statistics
import time

import numpy as np
import pytest
from gpu.device import (
    DEVICE,
    STAND_IN,
    DeviceBuffer,
    DeviceCudaIpc,
    DeviceShm,
    DeviceTcp,
    allocate,
    plain_copy,
    require,
)  # fmt: skip

from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import MIB, buffer_class
from transfer.testing.process import Process
from transfer.testing.waiting import outcome_of
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.driver import system_driver
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

require()
pytestmark = pytest.mark.gpu

NBYTES = MIB if STAND_IN else 256 * MIB
PIECE = 32 << 10
GOAL = 0.85
ROUNDS = 1 if STAND_IN else 20


def rate(work):
    """Bytes a second, the median of some rounds after two that warm up."""
    seconds = []
    for _ in range(ROUNDS + 2):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return NBYTES / statistics.median(seconds[2:])


@pytest.fixture
def show(capsys):
    def line(what, measured, limit, of="a plain copy"):
        reached = "yes" if measured >= GOAL * limit else "NO"
        with capsys.disabled():
            print(
                f"\n{what}: {measured / 1e9:.1f} GB/s, {of} {limit / 1e9:.1f} GB/s, ratio "
                f"{measured / limit:.2f}, goal {GOAL} reached: {reached}"
            )

    return line


def shuffled(base, piece, seed):
    return base + np.random.default_rng(seed).permutation(NBYTES // piece) * piece


def rate_between_processes(kind, piece):
    memory, other = Memory(), Process(kind)
    make = buffer_class(kind)
    try:
        endpoint, grant = other.offer(NBYTES)
        source = make(NBYTES, seed=1)
        memory.register(source.address, NBYTES)
        local, remote = shuffled(source.address, piece, 1), shuffled(int(grant.addresses[0]), piece, 2)
        sizes = np.full(len(local), piece)
        with kind(memory) as transport:
            peer = transport.connect(endpoint, deadline_s=DEADLINE_S)

            def send():
                assert outcome_of(peer.write(grant, local, remote, sizes, deadline_s=DEADLINE_S)).ok

            return rate(send)
    finally:
        other.kill()


@pytest.mark.parametrize("piece", [NBYTES, 1 * MIB, PIECE])
def test_rate_of_cuda_ipc_between_processes(kernels, show, piece):
    source, target = allocate(NBYTES), allocate(NBYTES)
    limit = rate(lambda: plain_copy(source, target, NBYTES))
    show(f"cuda_ipc, pieces of {piece >> 10} KiB", rate_between_processes(DeviceCudaIpc, piece), limit)


@pytest.mark.parametrize("device, host", [(DeviceTcp, TcpTransport), (DeviceShm, ShmTransport)])
@pytest.mark.parametrize("piece", [1 * MIB, PIECE])
def test_rate_through_the_host_between_processes(kernels, show, piece, device, host):
    """Beside the slower of the wire, which is the same transport between memory of the host, and the copy over PCIe."""
    source, staging = allocate(NBYTES), system_driver().lock_pages(DEVICE, NBYTES)
    copied = rate(lambda: plain_copy(source, staging, NBYTES))
    system_driver().unlock_pages(DEVICE, staging)
    limit = min(rate_between_processes(host, piece), copied)
    show(
        f"{host.name} from device to device, pieces of {piece >> 10} KiB",
        rate_between_processes(device, piece), limit, "the slower of wire and copy",
    )  # fmt: skip


def test_rate_of_gathering_to_locked_pages(kernels, show):
    source = DeviceBuffer(NBYTES, seed=1)
    staging = system_driver().lock_pages(DEVICE, NBYTES)
    copier = Copier(system_driver(), DEVICE)
    local, places = shuffled(source.address, PIECE, 1), staging + np.arange(NBYTES // PIECE) * PIECE
    sizes = np.full(len(local), PIECE)
    plan = copier.plan(local, places, sizes)
    limit = rate(lambda: plain_copy(source.address, staging, NBYTES))
    show("gather of 32 KiB to locked pages, planned before", rate(lambda: copier.run(plan)), limit)
    show(
        "gather of 32 KiB to locked pages, planning counted",
        rate(lambda: copier.run(copier.plan(local, places, sizes))),
        limit,
    )
    copier.close()
    system_driver().unlock_pages(DEVICE, staging)
