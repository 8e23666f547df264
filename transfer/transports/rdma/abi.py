"""The C interface of libibverbs, as `infiniband/verbs.h` of rdma-core has it: structures, constants and functions.

A structure is a numpy dtype whose fields have the names of the C members, those of them that are used here. What the
header does in line, as to post a request or to poll a queue, are calls by the table of functions in a context. This
binary interface (symbols of IBVERBS_1.1) has not changed since 2009; `tests/rdma/test_abi.py` holds it against the
header. For 64-bit little-endian machines.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint8, c_uint32, c_uint64, c_void_p
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = "libibverbs.so.1"


class Access(IntFlag):
    """`enum ibv_access_flags`."""

    LOCAL_WRITE = 1 << 0
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    MW_BIND = 1 << 4


class State(IntEnum):
    """`enum ibv_qp_state`."""

    RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)


class Attributes(IntFlag):
    """`enum ibv_qp_attr_mask`."""

    STATE = 1 << 0
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    DEST_QPN = 1 << 20


class Opcode(IntEnum):
    """`enum ibv_wr_opcode`."""

    RDMA_WRITE = 0
    RDMA_READ = 4
    LOCAL_INV = 7
    BIND_MW = 8


SIGNALED = 1 << 1
"""`enum ibv_send_flags`: the request has a completion also where it succeeds."""
RELIABLE_CONNECTED = 2
"""`enum ibv_qp_type`."""
WINDOW_TYPE_2 = 2
"""`enum ibv_mw_type`: a memory window that a request binds."""
HAS_WINDOWS_2B = 1 << 24
"""`enum ibv_device_cap_flags`: windows of type 2 that serve nobody but the queue pair by which they were bound."""


def _structure(nbytes: int, **fields: tuple[int, str]) -> np.dtype[Any]:
    """Of offsets and formats; `__` in a name is the dot of a member's member."""
    names = [name.replace("__", ".") for name in fields]
    offsets, formats = zip(*fields.values(), strict=True)
    return np.dtype({"names": names, "formats": list(formats), "offsets": list(offsets), "itemsize": nbytes})


U8, U16, U32, U64, I32 = "<u1", "<u2", "<u4", "<u8", "<i4"
SGE = _structure(16, addr=(0, U64), length=(8, U32), lkey=(12, U32))
SEND_WR = _structure(
    128, wr_id=(0, U64), next=(8, U64), sg_list=(16, U64), num_sge=(24, I32), opcode=(28, I32), send_flags=(32, U32),
    invalidate_rkey=(36, U32), wr__rdma__remote_addr=(40, U64), wr__rdma__rkey=(48, U32), bind_mw__mw=(80, U64),
    bind_mw__rkey=(88, U32), bind_mw__bind_info__mr=(96, U64), bind_mw__bind_info__addr=(104, U64),
    bind_mw__bind_info__length=(112, U64), bind_mw__bind_info__mw_access_flags=(120, U32),
)  # fmt: skip
WC = _structure(48, wr_id=(0, U64), status=(8, I32), opcode=(12, I32), vendor_err=(16, U32))
QP_INIT_ATTR = _structure(
    64, send_cq=(8, U64), recv_cq=(16, U64), cap__max_send_wr=(32, U32), cap__max_recv_wr=(36, U32),
    cap__max_send_sge=(40, U32), cap__max_recv_sge=(44, U32), qp_type=(52, I32),
)  # fmt: skip
QP_ATTR = _structure(
    144, qp_state=(0, I32), path_mtu=(8, I32), rq_psn=(20, U32), sq_psn=(24, U32), dest_qp_num=(28, U32),
    qp_access_flags=(32, U32), ah_attr__grh__dgid=(56, "S16"), ah_attr__grh__sgid_index=(76, U8),
    ah_attr__grh__hop_limit=(77, U8), ah_attr__grh__traffic_class=(78, U8), ah_attr__dlid=(80, U16),
    ah_attr__sl=(82, U8), ah_attr__is_global=(85, U8), ah_attr__port_num=(86, U8), pkey_index=(120, U16),
    max_rd_atomic=(126, U8), max_dest_rd_atomic=(127, U8), min_rnr_timer=(128, U8), port_num=(129, U8),
    timeout=(130, U8), retry_cnt=(131, U8), rnr_retry=(132, U8),
)  # fmt: skip
DEVICE_ATTR = _structure(
    232, max_qp_wr=(112, I32), device_cap_flags=(116, U32), max_sge=(120, I32), max_sge_rd=(124, I32),
    max_cqe=(132, I32), max_qp_rd_atom=(144, I32), max_qp_init_rd_atom=(156, I32),
)  # fmt: skip
PORT_ATTR = _structure(52, active_mtu=(8, I32), max_msg_sz=(20, U32), lid=(34, U16))
QP = _structure(160, qp_num=(52, U32))
MR = _structure(48, lkey=(36, U32), rkey=(40, U32))
MW = _structure(32, rkey=(16, U32))
COMP_CHANNEL = _structure(16, fd=(8, I32))
CONTEXT = _structure(
    328, ops__alloc_mw=(64, U64), ops__dealloc_mw=(80, U64), ops__poll_cq=(96, U64), ops__req_notify_cq=(104, U64),
    ops__post_send=(208, U64),
)  # fmt: skip

_POINTER = c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ibv_get_device_list": (POINTER(_POINTER), POINTER(c_int)),
    "ibv_free_device_list": (None, POINTER(_POINTER)),
    "ibv_get_device_name": (c_char_p, _POINTER),
    "ibv_open_device": (_POINTER, _POINTER),
    "ibv_close_device": (c_int, _POINTER),
    "ibv_query_device": (c_int, _POINTER, _POINTER),
    "ibv_query_port": (c_int, _POINTER, c_uint8, _POINTER),
    "ibv_alloc_pd": (_POINTER, _POINTER),
    "ibv_dealloc_pd": (c_int, _POINTER),
    "ibv_reg_mr": (_POINTER, _POINTER, _POINTER, c_size_t, c_int),
    "ibv_reg_dmabuf_mr": (_POINTER, _POINTER, c_uint64, c_size_t, c_uint64, c_int, c_int),
    "ibv_dereg_mr": (c_int, _POINTER),
    "ibv_create_comp_channel": (_POINTER, _POINTER),
    "ibv_destroy_comp_channel": (c_int, _POINTER),
    "ibv_create_cq": (_POINTER, _POINTER, c_int, _POINTER, _POINTER, c_int),
    "ibv_destroy_cq": (c_int, _POINTER),
    "ibv_get_cq_event": (c_int, _POINTER, POINTER(_POINTER), POINTER(_POINTER)),
    "ibv_ack_cq_events": (None, _POINTER, c_uint),
    "ibv_create_qp": (_POINTER, _POINTER, _POINTER),
    "ibv_modify_qp": (c_int, _POINTER, _POINTER, c_int),
    "ibv_destroy_qp": (c_int, _POINTER),
    "ibv_wc_status_str": (c_char_p, c_int),
}
"""What each returns, and its arguments. An old library lacks the one of dma-bufs."""

ALLOC_MW = ctypes.CFUNCTYPE(_POINTER, _POINTER, c_int, use_errno=True)
DEALLOC_MW = ctypes.CFUNCTYPE(c_int, _POINTER)
POLL_CQ = ctypes.PYFUNCTYPE(c_int, _POINTER, c_int, _POINTER)
REQ_NOTIFY_CQ = ctypes.PYFUNCTYPE(c_int, _POINTER, c_int)
POST_SEND = ctypes.PYFUNCTYPE(c_int, _POINTER, _POINTER, POINTER(_POINTER))
"""Of the table in a context. The last three take less than it takes to have the interpreter's lock back, so keep it."""


def loaded() -> ctypes.CDLL:
    """The library, with its functions declared. Raises OSError."""
    library = ctypes.CDLL(LIBRARY, use_errno=True)
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
    return library


def member(structure: np.dtype[Any], name: str, address: int) -> int:
    """Of the structure at this address."""
    fields = structure.fields
    assert fields is not None
    kind, offset = fields[name][:2]
    return int.from_bytes(ctypes.string_at(address + offset, kind.itemsize), "little")


def set_member(structure: np.dtype[Any], name: str, address: int, value: int) -> None:
    """Of 32 bits."""
    fields = structure.fields
    assert fields is not None
    c_uint32.from_address(address + fields[name][1]).value = value


def zeroed(structure: np.dtype[Any], **members: Any) -> npt.NDArray[Any]:
    """An array of one such structure."""
    made = np.zeros(1, structure)
    for name, value in members.items():
        made[name.replace("__", ".")] = value
    return made
