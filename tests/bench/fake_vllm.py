#!/usr/bin/env python3
"""Stands where a Python with vLLM would: answers the probe, and "serves" with a stand-in.

FAKE_VLLM says what goes wrong:

A comma-separated list of NAME=WHAT, where NAME is a connector or `alone`, and WHAT `refuses` (ends at its start),
`dies` (in its first round) or `hangs` (never gets ready).
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> None:
    if sys.argv[1] == "-c":
        if sys.argv[3:]:  # modules, of which the others are installed
            print(json.dumps({"missing": ["flexkv"], "versions": {"lmcache": None}}))
        else:
            print(json.dumps({"vllm": "0", "device": None}))
        return
    transfer = json.loads(option("--kv-transfer-config")) if "--kv-transfer-config" in sys.argv else {}
    name = transfer.get("kv_connector", "alone")
    wrong = dict(item.split("=") for item in filter(None, os.environ.get("FAKE_VLLM", "").split(",")))
    Path(os.environ["FAKE_VLLM_PIDS"], f"{name}-{os.getpid()}").touch()
    if wrong.get(name) == "refuses":
        sys.exit("RuntimeError: there is no GPU here")
    if wrong.get(name) == "hangs":
        time.sleep(600)
    serve(int(option("--port")), dies=wrong.get(name) == "dies")


def serve(port: int, dies: bool) -> None:
    from bench.streaming_server import StreamingServer

    class Deadly(list):
        """The requests so far, of which the twelfth is not answered any more."""

        def append(self, request: object) -> None:
            super().append(request)
            if len(self) == 12:
                print("ValueError: block 7 is gone", file=sys.stderr, flush=True)
                os._exit(1)

    with StreamingServer(port) as server:
        if dies:
            server.behaviour.asked = Deadly()
        server.behaviour.healthy = True
        while True:
            time.sleep(1)


main()
