"""`bench serve` on a real vLLM: servers that it starts itself, and one that runs already."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from e2e.conftest import Shared
from e2e.process import ENVIRONMENTS, small_environment
from e2e.server import ONE_CORE

SMALL = ["--requests", "8", "--prefixes", "4", "--prefix-tokens", "512", "--answer-tokens", "4", "--concurrency", "2"]
SMALL += ["--rounds", "1"]
LIMIT_S = 600.0


def bench(folder: Path, *arguments: str) -> dict:
    command = [ENVIRONMENTS / "vllm" / "bin" / "python", "-m", "mooncake_connector.cli.main", "bench", "serve"]
    done = subprocess.run(
        [*command, *arguments, *SMALL, "--json"],
        env=small_environment() | ONE_CORE, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_connector_gives_back_what_vllm_alone_computes_again(qwen3: Path, tmp_path: Path) -> None:
    """Two prefixes fit vLLM's own cache, so the others are computed again or come from the pool."""
    report = bench(tmp_path, "--model", str(qwen3), "--dtype", "float32")
    rows = {(row["server"], row["prompts"]): row for row in report["rows"]}
    assert {row["failed"] for row in rows.values()} == {0}
    alone, ours = rows["vLLM alone", "seen"], rows["mooncake-connector", "seen"]
    assert alone["tokens_connector"] == 0 and alone["tokens_computed"] > 8 * 32 + 512
    assert ours["tokens_connector"] >= 512 and ours["tokens_computed"] < alone["tokens_computed"]
    assert alone["answers_compared"] == ours["answers_compared"] == 8
    assert not list(tmp_path.iterdir())


def test_a_running_server_is_measured_by_its_address(shared: Shared, qwen3: Path, tmp_path: Path) -> None:
    report = bench(tmp_path, shared.server.url)
    new, seen = report["rows"]
    assert (new["requests"], new["failed"], seen["requests"], seen["failed"]) == (4, 0, 8, 0)
    assert report["settings"]["model"] == qwen3.name
    assert 4 * 512 * 0.9 < new["tokens_computed"] < 4 * 544 * 1.2, "the words are counted by the server's tokenizer"
    assert seen["tokens_computed"] < new["tokens_computed"]
