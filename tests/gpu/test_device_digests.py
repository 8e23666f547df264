"""Checksums that a device takes are those of the store."""

import numpy as np
import pytest
import xxhash
from gpu.device import DEVICE, require, where

require()
torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nbytes", [256, 320, 1024, 1088, 17 << 10, (33 << 10) + 64, 61 * 64 * 576 * 2, 8 << 20])
def test_they_are_what_xxhash_gives(nbytes):
    from vllm_plugin.device import digests

    torch.cuda.set_device(DEVICE)
    step = -(-(nbytes + digests.sums_nbytes(nbytes)) // 256) * 256
    memory = torch.randint(0, 256, (3 * step,), dtype=torch.uint8, device=where())
    order = [2, 0, 1]
    pages = torch.tensor([memory.data_ptr() + number * step for number in order], device=memory.device)
    table = torch.from_numpy(digests.constants()).to(memory.device)
    found = torch.zeros(3, dtype=torch.int64, device=memory.device)
    expected = [xxhash.xxh3_64_intdigest(memory[n * step : n * step + nbytes].cpu().numpy().data) for n in order]
    start = digests.prepare()
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    start(pages.data_ptr(), 3, nbytes, nbytes, table.data_ptr(), found.data_ptr(), stream)
    torch.cuda.synchronize()
    assert found.cpu().numpy().view(np.uint64).tolist() == expected
