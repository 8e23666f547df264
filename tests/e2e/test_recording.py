"""`record` beside a real vLLM, and `simulate` of what it recorded."""

from __future__ import annotations

import json
import random
from pathlib import Path

from typer.testing import CliRunner

from e2e.conftest import Shared
from e2e.hosts import COMMAND, Command
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.questions import draw_tokens
from mooncake_connector.cli.main import app
from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore

APART_S = 1.1
"""Uses of a page within a second are one."""


def test_a_prompt_that_is_asked_again_is_a_hit_of_what_was_recorded(
    shared: Shared, qwen3: Path, logs: Path, tmp_path: Path
) -> None:
    server, prompt = shared.server, draw_tokens(random.Random(20), 5 * PAGE_TOKENS + 17)
    server.compute(prompt)
    Pages(shared.pool, qwen3, lambda: server).wait_for(prompt)
    file, said = tmp_path / "trace.jsonl", logs / "record.log"
    said.unlink(missing_ok=True)
    keys = page_keys(prompt, PAGE_TOKENS)
    with EmbeddedStore(shared.pool) as store:  # other servers have left pages of other namespaces
        found = [info for info in store.namespaces() if all(store.space(info.namespace, info.shard).contains(keys))]
    (namespace,) = {info.namespace.digest.hex() for info in found}
    recorder = Command(
        said, COMMAND, "record", file, "--requests", "2", "--pool", shared.pool, "--namespace", namespace, "--json"
    )

    def is_full() -> bool:
        server.compute(prompt)
        return recorder.process.poll() is not None

    try:
        wait_for(file.exists, "a recording")
        wait_for(is_full, "two requests in the recording", every_s=APART_S)
    finally:
        recorder.end()
    assert json.loads(said.read_text()) == {"file": str(file), "requests": 2}
    asked = ["simulate", str(file), "--model", str(qwen3), "--capacity", "1GiB", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    outcomes = json.loads(result.stdout)
    assert {(each["hit_tokens"], each["tokens"]) for each in outcomes} == {(5 * PAGE_TOKENS, 10 * PAGE_TOKENS)}
