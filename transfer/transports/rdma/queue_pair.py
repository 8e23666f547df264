"""A queue pair, and the requests that are posted to it."""

from __future__ import annotations

import ctypes
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer.transports.base import Int64
from transfer.transports.rdma import abi
from transfer.transports.rdma.abi import Access, Attributes, Opcode, State
from transfer.transports.rdma.verbs import Context, Domain, Handle, Queue, Registered, Window, check, library, made
from transfer.transports.vectors import address_of

if TYPE_CHECKING:
    from transfer.transports.rdma.work import Read

_RNR_TIMER, _RNR_RETRY = 12, 7
"""The verbs' codes for what reads never meet: a peer that is not ready to receive."""
_HEAD = struct.Struct("<QQQiiIIQI")
"""Of a request: the members of `SEND_WR` up to the key of what is read."""
_BIND = struct.Struct("<QI4xQQQI")
"""The members that say what a window is bound to."""
_BIND_AT = 80
_RANGE = struct.Struct("<QII")


class Chain:
    """Requests that are posted together, in memory that the library reads. Begun anew for each post.

    The last one has a completion, with the number that it was given; of the others those that fail have.
    """

    def __init__(self, max_requests: int, max_ranges: int) -> None:
        self.requests = np.zeros(max_requests, abi.SEND_WR)
        self.ranges = np.zeros(max_requests * max_ranges, abi.SGE)
        self.address, self._ranges_at = address_of(self.requests), address_of(self.ranges)
        self._requests_memory = self.requests.view(np.uint8).data
        self._ranges_memory = self.ranges.view(np.uint8).data
        self._next = self.address + abi.SEND_WR.itemsize * np.arange(1, max_requests + 1)
        self.count = self._num_ranges = 0

    def begin(self) -> None:
        self.count = self._num_ranges = 0

    def read(self, number: int, read: Read) -> None:
        """Add one."""
        ranges_at = self._ranges_at + _RANGE.size * self._num_ranges
        for address, nbytes, key in read.target:
            _RANGE.pack_into(self._ranges_memory, _RANGE.size * self._num_ranges, address, nbytes, key)
            self._num_ranges += 1
        self._add(number, Opcode.RDMA_READ, ranges_at, len(read.target), 0, read.address, read.key)

    def reads(self, number: int, address: Int64, key: Int64, first: Int64, target: Int64) -> None:
        """Add several, where there are none yet, numbered from `number` on; the arrays are as those of `Work`."""
        count, requests, ranges = len(address), self.requests[: len(address)], self.ranges[: len(target)]
        ranges["addr"], ranges["length"], ranges["lkey"] = target.T
        requests["wr_id"] = np.arange(number, number + count)
        requests["next"] = self._next[:count]
        requests["sg_list"] = self._ranges_at + abi.SGE.itemsize * (first[:-1] - first[0])
        requests["num_sge"] = np.diff(first)
        requests["opcode"], requests["send_flags"], requests["invalidate_rkey"] = Opcode.RDMA_READ, 0, 0
        requests["wr.rdma.remote_addr"], requests["wr.rdma.rkey"] = address, key
        self.count, self._num_ranges = count, len(target)

    def bind(self, number: int, window: Window, key: int, to: Registered, address: int, nbytes: int) -> None:
        """Have a window let the peer read these bytes by this key."""
        at = abi.SEND_WR.itemsize * self.count + _BIND_AT
        _BIND.pack_into(
            self._requests_memory, at, window.address, key, to.address, address, nbytes, Access.REMOTE_READ
        )
        self._add(number, Opcode.BIND_MW)

    def invalidate(self, number: int, key: int) -> None:
        """Have the window of this key let nobody read anything."""
        self._add(number, Opcode.LOCAL_INV, invalidated=key)

    def ended(self) -> int:
        """Its address, once nothing more is added."""
        last = self.requests[self.count - 1 : self.count]
        last["next"], last["send_flags"] = 0, abi.SIGNALED
        return self.address

    def _add(
        self, number: int, opcode: Opcode, ranges_at: int = 0, num_ranges: int = 0, invalidated: int = 0,
        address: int = 0, key: int = 0,
    ) -> None:  # fmt: skip
        at = abi.SEND_WR.itemsize * self.count
        self.count += 1
        following = self.address + at + abi.SEND_WR.itemsize
        _HEAD.pack_into(
            self._requests_memory, at, number, following, ranges_at, num_ranges, opcode, 0, invalidated, address, key
        )


class QueuePair(Handle):
    """A reliable connected one. Everything here raises OSError."""

    def __init__(
        self, context: Context, domain: Domain, completions: Queue, max_requests: int, max_ranges: int
    ) -> None:
        wanted = abi.zeroed(
            abi.QP_INIT_ATTR, send_cq=completions.address, recv_cq=completions.address, cap__max_send_wr=max_requests,
            cap__max_recv_wr=1, cap__max_send_sge=max_ranges, cap__max_recv_sge=1, qp_type=abi.RELIABLE_CONNECTED,
        )  # fmt: skip
        create = partial(made, "ibv_create_qp", domain.address, address_of(wanted))
        super().__init__(create, library().ibv_destroy_qp, domain, completions)
        self._post = context.post_send
        self.number = abi.member(abi.QP, "qp_num", self.address)

    def reset(self) -> None:
        self._modify(Attributes.STATE, qp_state=State.RESET)

    def fail(self) -> None:
        """Have the card give up all that is under way, each with a completion."""
        self._modify(Attributes.STATE, qp_state=State.ERR)

    def to_init(self, port: int, access: Access, pkey_index: int) -> None:
        """`access` is what its peer may do."""
        self._modify(
            Attributes.STATE | Attributes.PKEY_INDEX | Attributes.PORT | Attributes.ACCESS_FLAGS,
            qp_state=State.INIT, pkey_index=pkey_index, port_num=port, qp_access_flags=access,
        )  # fmt: skip

    def to_rtr(
        self, number: int, sequence: int, lid: int, gid: bytes, port: int, *, sgid_index: int, mtu: int, hop_limit: int,
        max_dest_rd_atomic: int, sl: int, traffic_class: int,
    ) -> None:  # fmt: skip
        """Answer the peer's queue pair of this number, whose first packet has this sequence number."""
        self._modify(
            Attributes.STATE | Attributes.AV | Attributes.PATH_MTU | Attributes.DEST_QPN | Attributes.RQ_PSN
            | Attributes.MAX_DEST_RD_ATOMIC | Attributes.MIN_RNR_TIMER,
            qp_state=State.RTR, path_mtu=mtu, dest_qp_num=number, rq_psn=sequence,
            max_dest_rd_atomic=max_dest_rd_atomic, min_rnr_timer=_RNR_TIMER, ah_attr__grh__dgid=gid,
            ah_attr__grh__sgid_index=sgid_index, ah_attr__grh__hop_limit=hop_limit,
            ah_attr__grh__traffic_class=traffic_class, ah_attr__dlid=lid, ah_attr__sl=sl, ah_attr__is_global=1,
            ah_attr__port_num=port,
        )  # fmt: skip

    def to_rts(self, sequence: int, *, timeout: int, retry_cnt: int, max_rd_atomic: int) -> None:
        """Ask as well, with packets from this sequence number on."""
        self._modify(
            Attributes.STATE | Attributes.SQ_PSN | Attributes.TIMEOUT | Attributes.RETRY_CNT | Attributes.RNR_RETRY
            | Attributes.MAX_QP_RD_ATOMIC,
            qp_state=State.RTS, sq_psn=sequence, timeout=timeout, retry_cnt=retry_cnt, rnr_retry=_RNR_RETRY,
            max_rd_atomic=max_rd_atomic,
        )  # fmt: skip

    def post(self, chain: Chain) -> None:
        """It may have taken some of them where this fails."""
        failed = ctypes.c_void_p()
        check(self._post(self.address, chain.ended(), ctypes.byref(failed)), "requests cannot be posted")

    def _modify(self, attributes: Attributes, **values: Any) -> None:
        wanted = abi.zeroed(abi.QP_ATTR, **values)
        state = State(values["qp_state"]).name
        status = library().ibv_modify_qp(self.address, address_of(wanted), attributes)
        check(status, f"a queue pair cannot enter {state}")
