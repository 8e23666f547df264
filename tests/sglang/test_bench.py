"""The comparison `hicache` with the real SGLang, at small sizes; and that it notices wrong bytes and lost pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_pools import axes, mha

from bench.peers import hicache, hicache_child, hicache_rows, mooncake_store
from bench.peers.hicache_rows import CANONICAL, Geometry, HicacheScale
from bench.peers.report import Comparison
from mooncake_connector.cli.bench.measure import BenchError

TINY = Geometry("tiny", num_layers=2, num_heads=3, head_dim=8)
SCALE = HicacheScale(geometries=(TINY,), num_pages=4, lookup_keys=8, rounds=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, list[str], Path]:
    """The whole benchmark in small, with one setting of Mooncake: what it reported and said, and its folder."""
    folder = tmp_path_factory.mktemp("pools")
    said: list[str] = []
    peers = {hicache_rows.FILE, hicache_rows.MOONCAKE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake_store, "SETTINGS", ((mooncake_store.POOL_ON, "1", True),))
        report = hicache.run(
            folder, SCALE, sglang=Path(sys.executable), peers=peers, peer_python=sys.executable, progress=said.append
        )
    return report, said, folder


def test_every_figure_is_measured_beside_every_peer(run: tuple[Comparison, list[str], Path]) -> None:
    report, said, _ = run
    assert not [line for line in said if "WARNING" in line]
    assert all(row.value is not None and row.value > 0 for row in report.rows)
    assert all(row.peer and row.limit for row in report.rows if row.goal and "of limit, " in row.goal)
    figures = [row.figure for row in report.rows]
    assert len(figures) == len(set(figures))
    for layout in ("page_first", "page_first_direct", "page_head", "layer_first"):
        assert [f for f in figures if f.startswith("batch_get, tiny") and f.endswith(f" {layout}")]
        assert [f for f in figures if f.startswith("batch_set, tiny") and f.endswith(f" {layout}")]
    for beginning in ("batch_exists of 8", "the file backend", "the Mooncake backend, other process"):
        assert [f for f in figures if f.startswith(beginning)]
    assert report.versions["sglang"] and report.versions["mooncake"]


def test_nothing_of_the_run_stays(run: tuple[Comparison, list[str], Path]) -> None:
    *_, folder = run
    assert not list(folder.iterdir())


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_the_canonical_view_is_what_sglang_takes_for_a_layer_of_keys_and_values(layout: str) -> None:
    pool = mha(layout, layers=(0, 2), heads=3, dim=8, pages=4)
    view = axes(pool)
    view[:] = np.arange(view.size, dtype=np.uint16).reshape(view.shape)
    for which, layers in enumerate((pool.k_data_refs, pool.v_data_refs)):
        for layer, tokens in enumerate(layers):
            of_sglang = tokens.view(torch.int16).numpy().view(np.uint16).reshape(4, 16, 3, 8)
            assert np.array_equal(view[:, which, layer], of_sglang)


def test_the_canonical_view_of_page_head_is_heads_then_tokens_then_layers() -> None:
    """SGLang's own list of layers is not one in this layout; its kernels address `[page][head][token][layer]`."""
    pool = mha("page_head", layers=(0, 2), heads=3, dim=8, pages=4)
    axes(pool)[3, 1, 0, 15, 2] = 7
    (k_or_v, page, head, token, layer) = torch.nonzero(pool.kv_buffer.view(torch.int16)[..., 0]).squeeze().tolist()
    assert (k_or_v, page, head, token, layer) == (1, 3, 2, 15, 0)


def backends(folder: Path, *, filled: bool = False) -> dict[str, Any]:
    config = {"file_storage_path": str(folder)}
    return {"file": {"backend": "file", "config": config, "layouts": [CANONICAL], "filled": filled}}


def test_wrong_bytes_end_the_benchmark(tmp_path: Path) -> None:
    hicache_child.hold(SCALE, backends(tmp_path))
    with hicache_child.HostPages(SCALE, TINY, CANONICAL, backends(tmp_path, filled=True)) as pages:
        hicache_child.reads(SCALE, pages)
        damaged = next(path for path in tmp_path.iterdir() if "tiny" in path.name)
        damaged.write_bytes(bytes(damaged.stat().st_size))
        with pytest.raises(BenchError, match="other bytes"):
            hicache_child.reads(SCALE, pages)


def test_a_lost_page_ends_the_benchmark(tmp_path: Path) -> None:
    hicache_child.hold(SCALE, backends(tmp_path))
    with hicache_child.HostPages(SCALE, TINY, CANONICAL, backends(tmp_path, filled=True)) as pages:
        next(path for path in tmp_path.iterdir() if "tiny" in path.name).unlink()
        with pytest.raises(BenchError, match="of 4 pages"):
            hicache_child.reads(SCALE, pages)


def test_pages_are_absent_before_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hicache_child.HostPages(SCALE, TINY, CANONICAL, backends(tmp_path)) as pages:
        before: list[int] = []
        write = pages.write
        monkeypatch.setattr(pages, "write", lambda name: (before.append(len(list(tmp_path.iterdir()))), write(name)))
        hicache_child.writes(SCALE, pages)
    assert before == [0] * (SCALE.rounds + 1)
