"""Pages through the pipes of a real device, against the slow way through host memory: loads, saves, copies aside."""

import mmap
import statistics
import time

import numpy as np
import pytest
from gpu.device import DEVICE, STAND_IN, require, where

require()
torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from mooncake_connector.kv.geometry import Shard  # noqa: E402
from mooncake_connector.kv.page import PageFormat  # noqa: E402
from store_client.embedded.hashing import digest  # noqa: E402
from transfer.transports.cuda.driver import system_driver  # noqa: E402
from vllm_plugin.blocks import KVBlocks  # noqa: E402
from vllm_plugin.device.opening import Device  # noqa: E402
from vllm_plugin.device.page_locks import PageLocks  # noqa: E402

OWN, LARGER = Shard(1, 9, 1, 3), Shard(0, 10, 0, 4)
NUM_BLOCKS, NUM_PAGES, PAGE_TOKENS = 400, 8 if STAND_IN else 60, 64
ORDERS = ("LBNHC", "LBHNC", "BLNHC")


def page_format(shard: Shard) -> PageFormat:
    return PageFormat(shard.num_layers, PAGE_TOKENS, shard.num_heads, 128, 128, 2)


def blocks_of(seed: int, block_tokens: int, order: str):
    """All layers' memory, and what is made of it."""
    sizes = {"L": OWN.num_layers, "B": NUM_BLOCKS, "H": OWN.num_heads, "N": block_tokens, "C": 256}
    generator = torch.Generator(where()).manual_seed(seed)
    shape = [sizes[axis] for axis in order]
    memory = torch.randint(-9999, 9999, shape, dtype=torch.int16, device=where(), generator=generator)
    layers = memory.permute([order.index(axis) for axis in "LBHNC"]).unbind(0)
    return memory, KVBlocks(list(layers), OWN, page_format(OWN), None)


@pytest.fixture(params=[True, False], ids=["page-locked", "pageable"])
def host(request):
    """Memory of the host for pages, locked by the driver or not."""
    locks = PageLocks(system_driver(), DEVICE)
    nbytes = -(-NUM_PAGES * page_format(LARGER).nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    if request.param:
        assert locks.lock(memory.ctypes.data, nbytes), locks.refused
    yield locks, memory
    if request.param:
        locks.unlock(memory.ctypes.data)


@pytest.fixture
def device(host):
    locks, _ = host
    one = Device(where(), locks, 8 << 20, page_format(LARGER).nbytes)
    yield one
    one.close()


def table(number: int, block_tokens: int) -> list[int]:
    """Blocks of a page that begins somewhere in the first of them."""
    count = PAGE_TOKENS // block_tokens + 1
    order = np.random.default_rng(7).permutation(NUM_BLOCKS)
    return order[count * number : count * (number + 1)].tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", [OWN, LARGER], ids=["own shard", "larger shard"])
def test_pages_reach_the_blocks(host, device, order, part):
    memory, blocks = blocks_of(1, 16, order)
    expected, plain = blocks_of(1, 16, order)
    pages = device.pages(blocks, OWN, page_format(OWN))
    fmt = page_format(part)
    host[1][:] = np.random.default_rng(2).integers(0, 256, len(host[1]), dtype=np.uint8)
    for number in range(NUM_PAGES):
        page = host[1][number * fmt.nbytes : (number + 1) * fmt.nbytes]
        one = part, table(number, 16), number % 16, page, number % 3
        pages.load_page(*one)
        plain.load_page(*one)
    assert not torch.equal(memory, expected), "the last pages wait until all is settled"
    assert pages.settle_loads() == [digest(host[1][n * fmt.nbytes :][: fmt.nbytes]) for n in range(NUM_PAGES)]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("gib", [3, 17], ids=["2^31 bytes", "2^31 words"])
def test_blocks_are_copied_aside_from_layers_beyond_what_32_bits_count(gib, capsys):
    """In the engine's stream, so the time counts; it is shown."""
    block, chosen_nbytes = 1 << 16, 256 << 20
    if STAND_IN:
        gib, chosen_nbytes = 1 / 256, 1 << 20
    elif torch.cuda.mem_get_info(DEVICE)[0] < (gib + 1) << 30:
        pytest.skip(f"NO {gib + 1} GiB free on this GPU, so this was not tried")
    num_blocks = int(gib * 2**30) // block
    chosen = np.linspace(0, num_blocks - 1, chosen_nbytes // block).astype(int).tolist()
    layer = torch.zeros((num_blocks, 64, 2, 512), dtype=torch.uint8, device=where()).permute(0, 2, 1, 3)  # LBNHC
    layer[chosen] = torch.randint(0, 256, (len(chosen), 2, 64, 512), dtype=torch.uint8, device=where())
    blocks = KVBlocks([layer], Shard(0, 1, 0, 2), PageFormat(1, PAGE_TOKENS, 2, 128, 128, 2), None)
    torch.cuda.synchronize(DEVICE)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        copies = blocks.copy(chosen)
        torch.cuda.synchronize(DEVICE)
        seconds.append(time.perf_counter() - started)
    assert torch.equal(copies._tensors[0], layer[chosen])
    took_ms = statistics.median(seconds) * 1e3
    with capsys.disabled():
        print(f"\n{chosen_nbytes >> 20} MiB copied aside out of {gib:.3g} GiB: {took_ms:.2f} ms; 0.4 expected")


@pytest.mark.parametrize("order", ORDERS)
def test_pages_leave_the_blocks_and_copies_of_them(host, device, order):
    _, blocks = blocks_of(3, 16, order)
    pages, fmt = device.pages(blocks, OWN, page_format(OWN)), page_format(OWN)
    copies = blocks.copy(list(range(NUM_BLOCKS)))
    torch.cuda.current_stream(DEVICE).synchronize()
    expected = np.zeros((NUM_PAGES, fmt.nbytes), dtype=np.uint8)
    for number in range(NUM_PAGES):
        page = host[1][number * fmt.nbytes : (number + 1) * fmt.nbytes]
        at = table(number, 16), number % 16
        if number % 4:
            pages.save_page(*at, page)
        else:
            pages.save_copied(copies, *at, page)
        blocks.save_page(*at, expected[number])
    assert pages.settle_saves() == list(map(digest, expected))
    assert np.array_equal(host[1][: expected.size].reshape(expected.shape), expected) and expected.any()
