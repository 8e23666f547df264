"""Aux rows beside KV on a device; here the device is the processor as well."""

from __future__ import annotations

import torch

from sglang_backend.pd.aux_rows import AuxRows


def test_rows_go_to_the_device_and_back_one_by_one() -> None:
    host = [torch.arange(40, dtype=torch.int32).view(5, 8), torch.rand(5, 3)]
    was = [rows.clone() for rows in host]
    sizes = [rows.nbytes for rows in host]
    aux = AuxRows([rows.data_ptr() for rows in host], sizes, [nbytes // 5 for nbytes in sizes], torch.device("cpu"))
    assert aux.addresses != [rows.data_ptr() for rows in host]
    aux.take(3)
    for rows in host:
        rows.zero_()
    aux.give(3)
    for rows, before in zip(host, was, strict=True):
        assert torch.equal(rows[3], before[3]) and not rows[:3].any() and not rows[4].any()
