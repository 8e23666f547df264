"""The kernel on a device gives what torch's own indexing gives."""

import numpy as np
import pytest
from gpu.device import DEVICE, DeviceBuffer, require, where

from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.driver import system_driver

require()
pytestmark = pytest.mark.gpu


@pytest.fixture
def copier(kernels, monkeypatch):
    """It must use the kernel: one copy for each piece would be right as well."""
    made = Copier(system_driver(), DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(made, "plan_each", None)
        yield made
    made.close()


def test_what_was_warmed_up_is_not_compiled_by_the_first_transfer(copier, kernels, monkeypatch):
    copier.warm_up()
    monkeypatch.setattr(kernels, "prepare", None)
    source, target = DeviceBuffer(1 << 20, seed=1), DeviceBuffer(1 << 20)
    starts = np.arange(32) * (32 << 10)
    copier.run(copier.plan(source.address + starts, target.address + starts[::-1].copy(), np.full(32, 32 << 10)))
    expected = np.asarray(source.bytes).reshape(32, -1)[::-1]
    assert np.array_equal(np.asarray(target.bytes).reshape(32, -1), expected)


@pytest.mark.parametrize("nbytes", [32 << 10, 576, 1000, 514, 33, 7])
def test_gathered_to_locked_pages_and_scattered_from_there(copier, nbytes):
    import torch

    device = where()
    blocks = torch.randint(0, 256, (512, nbytes), dtype=torch.uint8, device=device)
    there = torch.zeros_like(blocks)
    chosen, wanted = torch.randperm(512)[:300], torch.randperm(512)[:300]
    local, remote = (base.data_ptr() + index.numpy() * nbytes for base, index in ((blocks, chosen), (there, wanted)))
    staging = torch.zeros(300 * nbytes, dtype=torch.uint8).pin_memory()
    places, sizes = staging.data_ptr() + np.arange(300) * nbytes, np.full(300, nbytes)
    torch.cuda.synchronize()
    copier.run(copier.plan(local, places, sizes))
    copier.run(copier.plan(places, remote, sizes))
    assert staging.numpy().tobytes() == torch.index_select(blocks, 0, chosen.to(device)).cpu().numpy().tobytes()
    expected = torch.zeros_like(blocks)
    expected[wanted.to(device)] = blocks[chosen.to(device)]
    assert torch.equal(there, expected)


def test_pieces_at_every_distance_of_their_addresses(copier):
    import torch

    device = where()
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    cases = [(a, b, n) for a in range(17) for b in range(17) for n in (1, 15, 16, 100, 8192, 8200)]
    steps = np.arange(len(cases)) * (1 << 20) // (len(cases) + 1) // 16 * 16
    cases = [(a, b, min(n, 550)) for a, b, n in cases]
    columns = np.array(cases).T
    torch.cuda.synchronize()
    copier.run(copier.plan(source.data_ptr() + steps + columns[0], target.data_ptr() + steps + columns[1], columns[2]))
    expected, content = np.zeros(1 << 20, dtype=np.uint8), source.cpu().numpy()
    for step, (a, b, n) in zip(steps, cases, strict=True):
        expected[step + b : step + b + n] = content[step + a : step + a + n]
    assert np.array_equal(target.cpu().numpy(), expected)
