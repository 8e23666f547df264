"""A stand-in for an engine's server below `mooncake-connector up`: it answers /health and /metrics, and dies on demand.

    deployed.py --port N [--fails STATUS] [--child] [--deaf] [--silent]

POST /die/STATUS ends it. With `--child` it has a process in a session of its own that ignores SIGTERM, and that one has
another; with `--deaf` it ignores SIGTERM itself; with `--silent` it never listens.
"""

from __future__ import annotations

import argparse
import http.server
import os
import signal
import subprocess
import sys
import time

METRICS = """\
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:request_success_total{finished_reason="stop"} 5.0
vllm:request_success_total{finished_reason="length"} 6.0
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 100.0
vllm:external_prefix_cache_hits_total{engine="0"} 150.0
vllm:mooncake_connector_fetch_bytes_total{engine="0"} 1.048576e+06
"""
ORPHANS = """\
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] != "0":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "0", ""], start_new_session=True)
time.sleep(600)
"""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = METRICS.encode() if self.path == "/metrics" else b"{}"
        if self.path == "/v1/models":
            content = b'{"data": [{"id": "the model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        os._exit(int(self.path.rpartition("/")[2]))

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fails", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--silent", action="store_true")
    arguments, _ = parser.parse_known_args()
    if arguments.fails:
        print("the reason why it fails", flush=True)
        sys.exit(arguments.fails)
    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.child:
        subprocess.Popen([sys.executable, "-c", ORPHANS, "1", ORPHANS], start_new_session=True)
    if arguments.silent:
        time.sleep(600)
    http.server.ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
