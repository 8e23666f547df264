"""What `transfer.transports.cuda` tells ctypes is what NVIDIA's header says, of which Triton brings a copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from transfer.transports.cuda import driver as cuda

triton = pytest.importorskip("triton")
HEADER = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"
TYPES = {
    "unsigned int": "c_uint", "int": "c_int", "CUdevice": "c_int", "size_t": "c_ulong", "CUdeviceptr": "c_ulong",
    "CUcontext": "c_void_p", "CUstream": "c_void_p", "CUipcMemHandle": "Handle", "CUpointer_attribute": "c_int",
    "CUresult": "c_int", "CUdevice_attribute": "c_int", "CUmemRangeHandleType": "c_int",
    "unsigned long long": "c_ulong", "CUflushGPUDirectRDMAWritesTarget": "c_int",
    "CUflushGPUDirectRDMAWritesScope": "c_int",
}  # fmt: skip


@pytest.fixture(scope="module")
def header() -> str:
    return HEADER.read_text()


@pytest.mark.parametrize("name", cuda._ARGUMENTS)
def test_the_arguments_of_each_function(header: str, name: str) -> None:
    plain = name.removesuffix("_v2")
    newer = re.search(rf"^#define {plain}\s+{plain}(_v\d+)$", header, re.M)
    assert name == plain + (newer[1] if newer else ""), "the header calls another version of it"
    declared = re.search(rf"^CUresult CUDAAPI {plain}\((.*)\);", header, re.M)
    assert declared
    types = [re.sub(r"\s*\b\w+$", "", one.strip()) for one in declared[1].split(",")]
    expected = ["c_void_p" if one.endswith("*") else TYPES[one] for one in types]
    assert [one.__name__ for one in cuda._ARGUMENTS[name]] == expected


@pytest.mark.parametrize(
    "ours, name",
    [
        (cuda.HANDLE_NBYTES, "CU_IPC_HANDLE_SIZE"),
        (cuda._MEMORY_TYPE, "CU_POINTER_ATTRIBUTE_MEMORY_TYPE"),
        (cuda._DEVICE_ORDINAL, "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL"),
        (cuda._TYPE_DEVICE, "CU_MEMORYTYPE_DEVICE"),
        (cuda.NON_BLOCKING, "CU_STREAM_NON_BLOCKING"),
        (cuda._LAZY_PEER_ACCESS, "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS"),
        (cuda._PORTABLE, "CU_MEMHOSTALLOC_PORTABLE"),
        (cuda._PORTABLE, "CU_MEMHOSTREGISTER_PORTABLE"),
        (cuda._RELAXED, "CU_STREAM_CAPTURE_MODE_RELAXED"),
        (cuda.DMA_BUF_SUPPORTED, "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"),
        (cuda.FLUSH_OPTIONS, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"),
        (cuda.WRITES_ORDERING, "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"),
        (cuda.FLUSH_BY_HOST, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST"),
        (cuda.ORDERED_FOR_OWNER, "CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER"),
        (cuda._DMA_BUF_DESCRIPTOR, "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"),
        (cuda._CURRENT_CONTEXT, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX"),
        (cuda._TO_OWNER, "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER"),
    ],
)
def test_the_constants(header: str, ours: int, name: str) -> None:
    found = re.search(rf"^\s*(?:#define\s+)?{name}\s*=?\s*(\w+)", header, re.M)
    assert found and int(found[1], 0) == ours
