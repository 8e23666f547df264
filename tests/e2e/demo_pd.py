"""`make demo-pd`: one file brings up a prefill and a decode instance of vLLM with a router, and a question is asked.

What the decode instance did not compute came from the prefill instance: the pool is off.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.demo import LOGS, MAX_TOKENS, QUESTION, TEXT, chat
from e2e.process import free_port, small_environment
from models import checkpoint
from mooncake_connector.deploy.watch import read

START_S, ANSWER_S, METRICS_S, STOP_S = 600.0, 300.0, 60.0, 120.0
COMMAND = Path(sys.executable).parent / "mooncake-connector"
FETCHED = re.compile(r"^vllm:mooncake_connector_fetched_tokens_total\S* (\S+)$", re.MULTILINE)


def deployment(model: Path) -> str:
    return f"""\
engine: vllm
model: {model}
flags: --served-model-name {model.name} --max-model-len 4096 --dtype float32 --enforce-eager
env:
  VLLM_CPU_KVCACHE_SPACE: 1
  VLLM_CPU_OMP_THREADS_BIND: nobind
  OMP_NUM_THREADS: 1
prefill:
  port: {free_port()}
decode:
  port: {free_port()}
connector:
  prefix_reuse: false
router:
  port: {free_port()}
logs: {LOGS / "demo-pd"}
"""


def main() -> int:
    started_s = time.monotonic()
    model = checkpoint("smollm2")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(text := deployment(model))
        print(text)
        try:
            with running(file) as printed:
                url = re.search(r"ready at (\S+?),", printed)
                decode = re.search(r"--decode (\S+)", commands(file))
                assert url and decode, printed
                answer = ask(url[1], model.name)
                fetched_tokens = fetched(decode[1])
        except AssertionError as error:
            print(f"demo-pd: FAILED {error}", flush=True)
            return 1
    print(f"\n> {answer}\n\ntook {time.monotonic() - started_s:.0f} s")
    if not fetched_tokens:
        print(f"demo-pd: FAILED fetched_tokens={fetched_tokens}; see {LOGS / 'demo-pd'}", flush=True)
        return 1
    print(f"demo-pd: OK fetched_tokens={fetched_tokens}", flush=True)
    return 0


def fetched(url: str) -> int:
    """Tokens that an instance did not have to compute; vLLM counts them a step later."""
    deadline_s = time.monotonic() + METRICS_S
    while True:
        found = FETCHED.search(read(f"{url}/metrics") or "")
        tokens = int(float(found[1])) if found else 0
        if tokens or time.monotonic() > deadline_s:
            return tokens
        time.sleep(0.5)


def commands(file: Path) -> str:
    return subprocess.run([COMMAND, "up", file, "--print"], check=True, capture_output=True, text=True).stdout


@contextmanager
def running(file: Path) -> Iterator[str]:
    """`up` in the background, as in another terminal; gives what it has printed when it was ready."""
    output = file.with_suffix(".txt")
    with open(output, "wb") as log:
        up = subprocess.Popen([COMMAND, "up", file], stdout=log, stderr=subprocess.STDOUT, env=small_environment())
    shown = 0
    try:
        deadline_s = time.monotonic() + START_S
        while "ready at" not in (text := output.read_text()):
            print(text[shown:], end="", flush=True)
            shown = len(text)
            assert up.poll() is None, f"up ended with status {up.returncode}"
            assert time.monotonic() < deadline_s, f"not ready within {START_S:g} s"
            time.sleep(0.2)
        print(text[shown:], flush=True)
        yield text
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGINT)
        status = up.wait(STOP_S)
    assert status == 0, f"up ended with status {status}"


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": chat(f"{TEXT[:4000]}\n\n{QUESTION}"), "max_tokens": MAX_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["text"])


if __name__ == "__main__":
    os.makedirs(LOGS, exist_ok=True)
    sys.exit(main())
