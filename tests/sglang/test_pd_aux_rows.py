"""Aux rows beside KV on a device; here the device is the processor as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def test_no_copy_stands_behind_what_the_scheduler_gave_the_device(monkeypatch) -> None:
    host, copied, under = torch.arange(8).view(2, 4), [], []

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        under.append(given)
        yield
        under.pop()

    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *tensors: (copied.append(list(under)), copy(*tensors)))
    aux = AuxRows([host.data_ptr()], [host.nbytes], [host[0].nbytes], torch.device("cpu"), "its own")
    aux.take(1)
    aux.give(1)
    assert copied == [["its own"], ["its own"]]
