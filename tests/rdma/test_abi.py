"""The structures of libibverbs, as they are declared here, held against its header by a compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdma.image import Missing, made
from rdma.machine import FOLDER

from transfer.transports.rdma import abi

STRUCTURES: dict[str, np.dtype[Any]] = {
    "ibv_sge": abi.SGE, "ibv_send_wr": abi.SEND_WR, "ibv_wc": abi.WC, "ibv_qp_init_attr": abi.QP_INIT_ATTR,
    "ibv_qp_attr": abi.QP_ATTR, "ibv_device_attr": abi.DEVICE_ATTR, "ibv_port_attr": abi.PORT_ATTR, "ibv_qp": abi.QP,
    "ibv_mr": abi.MR, "ibv_mw": abi.MW, "ibv_comp_channel": abi.COMP_CHANNEL, "ibv_context": abi.CONTEXT,
}  # fmt: skip
CONSTANTS = {
    "IBV_ACCESS_LOCAL_WRITE": abi.Access.LOCAL_WRITE, "IBV_ACCESS_REMOTE_WRITE": abi.Access.REMOTE_WRITE,
    "IBV_ACCESS_REMOTE_READ": abi.Access.REMOTE_READ, "IBV_ACCESS_MW_BIND": abi.Access.MW_BIND,
    "IBV_SEND_SIGNALED": abi.SIGNALED, "IBV_QPT_RC": abi.RELIABLE_CONNECTED, "IBV_MW_TYPE_2": abi.WINDOW_TYPE_2,
    "IBV_DEVICE_MEM_WINDOW_TYPE_2B": abi.HAS_WINDOWS_2B, "IBV_WC_SUCCESS": 0,
    **{f"IBV_QPS_{state.name}": state for state in abi.State},
    **{f"IBV_WR_{opcode.name}": opcode for opcode in abi.Opcode},
    **{f"IBV_QP_{attribute.name}": attribute for attribute in abi.Attributes},
}  # fmt: skip
IN_PART = {"ibv_qp", "ibv_context"}
"""Only the beginning of what they have is declared, or more room than they need."""


def test_each_structure_and_constant_is_that_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("THE STRUCTURES OF libibverbs ARE NOT CHECKED: no C compiler: apt-get install gcc libc6-dev")
    try:
        headers = made(FOLDER).added / "usr" / "include"
    except Missing as error:
        pytest.skip(f"THE STRUCTURES OF libibverbs ARE NOT CHECKED: its header cannot be had: {error}")
    expected, lines = {}, []
    for name, structure in STRUCTURES.items():
        assert structure.fields is not None
        for field, (kind, offset, *_) in structure.fields.items():
            expected[f"{name}.{field}"] = (offset, kind.itemsize)
            member = f"((struct {name} *)0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", (size_t)&{member}, sizeof({member}));')
        if name not in IN_PART:
            expected[name] = (structure.itemsize, 0)
            lines.append(f'printf("{name} %zu 0\\n", sizeof(struct {name}));')
    for name, value in CONSTANTS.items():
        expected[name] = (int(value), 0)
        lines.append(f'printf("{name} %lld 0\\n", (long long){name});')
    body = "\n".join(lines)
    (tmp_path / "abi.c").write_text(f"#include <infiniband/verbs.h>\n#include <stdio.h>\nint main(void) {{ {body} }}\n")
    subprocess.run([compiler, "-I", str(headers), "abi.c", "-o", "abi"], cwd=tmp_path, check=True)
    said = subprocess.run([str(tmp_path / "abi")], capture_output=True, text=True, check=True).stdout
    found = {name: (int(one), int(two)) for name, one, two in (line.split() for line in said.splitlines())}
    assert found == expected
