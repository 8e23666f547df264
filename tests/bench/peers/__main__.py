"""`make bench NAME=...`: this project beside its peers, on this machine.

    python -m bench.peers store|hicache|transfer|transports|tiers|pd|pd-sglang|routing|index|eviction|hybrid|watched|
        serve [--peer NAME]... [--json FILE]

The rows go to stdout, how far it is to stderr. docs/benchmarks.md says what is measured, and has the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.peers.report import Comparison
from bench.peers.serve import PEERS as CONNECTORS
from mooncake_connector.cli.bench.machine import default_folder
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.report import say
from mooncake_connector.cli.output import print_error, width

LEGENDS = {
    "store": "limit: memcpy or a bare LMDB on this machine; peer: the Mooncake Store between two processes, the better "
    "of its connection pool on and off. Best round of each; rounds alternate.",
    "hicache": "limit: memcpy in the same rounds; peer: SGLang's in-tree Mooncake backend over TCP, pages in another "
    "process, the better of its connection pool on and off. Best round of each; rounds alternate.",
    "transfer": "limit: process_vm_readv of the same pieces (cma), memcpy (shm), sendall/recv_into over one connection "
    "(tcp); peer: NIXL with UCX's own choice (cma), Mooncake's Transfer Engine at its better setting (tcp). Best round "
    "of each; rounds alternate.",
    "transports": "peer: the library alone, with the same pieces. Medians of rounds in turn. Processor time is that of "
    "both processes.",
    "tiers": "limit: fio with direct I/O and as many requests at once (disk), plain files written, synced and read by "
    "as many threads (folder), a bare client of Mooncake's with the same calls (mooncake), the same pool without tiers "
    "or without fetches (the rest). Medians of rounds in turn.",
    "pd": "limit: the decode instance alone; peer: vLLM's NixlConnector between two servers of its own, prefill first, "
    "the better of its num_threads 4 (its default) and 0. Medians; rounds alternate.",
    "routing": "Nothing to be held against but the other policies. Hits and tokens by the servers' own counters.",
    "hybrid": "limit: vLLM alone, which computes the prompt, or has it in its own prefix cache. Medians; the servers "
    "take turns.",
    "index": "CPU time, of the server's thread for questions, of all threads for events.",
    "eviction": "Hits of made traffic, everywhere the same; goal: at most 0.5 points behind the better of the other "
    "two. CPU time of the calling thread, the best and the mean of rounds.",
    "watched": "limit: the same server while nobody looks. Medians; the windows take turns.",
    "pd-sglang": "limit: one SGLang server; peer: SGLang's in-tree Mooncake backend over TCP between two servers of "
    "its own. Medians; rounds alternate.",
}


def store(given: argparse.Namespace) -> Comparison:
    from bench.peers import store

    return store.run(
        given.folder, quick=given.quick, peers=given.peer, peer_python=given.peer_python, engine=_engine(given),
        progress=say,
    )  # fmt: skip


def hicache(given: argparse.Namespace) -> Comparison:
    from bench.peers import hicache
    from bench.peers.hicache_rows import HicacheScale

    scale = hicache.QUICK if given.quick else HicacheScale()
    return hicache.run(
        given.folder, scale, sglang=given.sglang_python, peers=given.peer, peer_python=given.peer_python, progress=say
    )


def transfer(given: argparse.Namespace) -> Comparison:
    from bench.peers import transfer

    scale = transfer.QUICK if given.quick else transfer.Scale()
    return transfer.run(scale, peers=given.peer, peer_python=given.peer_python, progress=say)


def transports(given: argparse.Namespace) -> Comparison:
    from bench.peers import transports

    return transports.run(transports.QUICK if given.quick else transports.TransportScale(), say)


def tiers(given: argparse.Namespace) -> Comparison:
    from bench.peers import tiers
    from bench.tiers.measure import Scale

    scale = tiers.QUICK if given.quick else Scale()
    return tiers.run(given.disk, given.folder, scale, given.peer, _engine(given), say)


def pd(given: argparse.Namespace) -> Comparison:
    from bench.peers import pd

    engine = _engine(given)
    if engine is None:
        raise BenchError("pd needs --vllm-python and --model")
    return pd.run(engine, given.peer_python if given.peer else None, pd.QUICK if given.quick else pd.PDScale(), say)


def pd_sglang(given: argparse.Namespace) -> Comparison:
    from bench.peers import pd_sglang

    if given.model is None or not (given.model / "config.json").is_file():
        raise BenchError("pd-sglang needs --model DIR, a checkpoint with its config.json")
    scale = pd_sglang.QUICK if given.quick else pd_sglang.Scale()
    return pd_sglang.run(given.sglang_python, given.model, given.peer_python if given.peer else None, scale, say)


def routing(given: argparse.Namespace) -> Comparison:
    from bench.peers import routing

    engine = _engine(given)
    if engine is None:
        raise BenchError("routing needs --vllm-python and --model")
    return routing.run(engine, routing.QUICK if given.quick else routing.Scale(), say)


def hybrid(given: argparse.Namespace) -> Comparison:
    from bench.peers import hybrid
    from bench.peers.vllm import Engine

    if given.vllm_python is None or given.model is None:
        raise BenchError("hybrid needs --vllm-python PATH and --model DIR, the folder that has the hybrid models")
    if missing := [name for name in hybrid.MODELS if not (given.model / name / "config.json").is_file()]:
        raise BenchError(f"--model {given.model} has no checkpoint {', '.join(missing)}; `make models` makes them")
    scale = hybrid.QUICK if given.quick else hybrid.Scale()
    return hybrid.run(Engine(given.vllm_python, given.model), given.folder, scale, say)


def watched(given: argparse.Namespace) -> Comparison:
    from bench.peers import watched

    engine = _engine(given)
    if engine is None:
        raise BenchError("watched needs --vllm-python and --model")
    return watched.run(engine, given.folder, watched.QUICK if given.quick else watched.Scale(), say)


def index(given: argparse.Namespace) -> Comparison:
    from bench.peers import conductor

    return conductor.run(given.folder, conductor.QUICK if given.quick else conductor.Scale(), say)


def eviction(given: argparse.Namespace) -> Comparison:
    from bench.peers import eviction

    return eviction.run(given.folder, eviction.QUICK if given.quick else eviction.Scale(), say)


def serve(given: argparse.Namespace) -> None:
    """Prints as `mooncake-connector bench serve` does."""
    from bench.peers import plot, serve
    from mooncake_connector.cli.bench.serve import command
    from mooncake_connector.cli.bench.serve.workload import Workload

    if given.model is None:
        raise BenchError("serve needs --model DIR")
    if given.plot:
        plot.check()
    work = Workload(8, 4, 512, answer_tokens=4, concurrency=2, rounds=1) if given.quick else Workload()
    with command.ended_like_ctrl_c():
        report = serve.run(
            given.vllm_python or Path(sys.executable), given.model, given.dtype, work, given.peer or list(CONNECTORS),
            given.folder, 120.0, say,
        )  # fmt: skip
    if given.json:
        given.json.write_text(report.to_json())
    try:
        if given.plot:
            given.plot.write_bytes(plot.draw(report))
    finally:  # the report is there also where no picture can be
        command.show(report, as_json=False, compared=True)


# What each compares with: nothing unless it is asked for, but `serve` with every connector of vLLM's.
BENCHES: dict[str, tuple[Callable[[argparse.Namespace], Comparison | None], tuple[str, ...]]] = {
    "store": (store, ("mooncake",)),
    "hicache": (hicache, ("mooncake", "file")),
    "transfer": (transfer, ("mooncake", "nixl")),
    "transports": (transports, ()),
    "tiers": (tiers, ("mooncake",)),
    "pd": (pd, ("nixl",)),
    "pd-sglang": (pd_sglang, ("mooncake",)),
    "routing": (routing, ()),
    "index": (index, ()),
    "eviction": (eviction, ()),
    "hybrid": (hybrid, ()),
    "watched": (watched, ()),
    "serve": (serve, tuple(CONNECTORS)),
}


def _engine(given: argparse.Namespace) -> Any:
    from bench.peers.vllm import Engine

    if given.vllm_python is None and given.model is None:
        return None
    if given.vllm_python is None or given.model is None or not (given.model / "config.json").is_file():
        raise BenchError("vLLM is measured with --vllm-python PATH and --model DIR, a checkpoint with its config.json")
    return Engine(given.vllm_python, given.model)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench.peers", description="Compare this project with its peers on this machine.")
    names = parser.add_subparsers(dest="name", required=True)
    for name, (_, peers) in BENCHES.items():
        one = names.add_parser(name, epilog=LEGENDS.get(name))
        one.add_argument("--peer", action="append", default=[], choices=peers, help="also measure it; may be repeated")
        one.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
        one.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, not how fast")
        one.add_argument("--peer-python", default=sys.executable, metavar="PATH", help="Python with the peer's wheel")
        one.add_argument("--folder", type=Path, default=default_folder(), help="of the temporary pools")
        one.add_argument("--vllm-python", type=Path, metavar="PATH", help="Python with vLLM and this project")
        one.add_argument("--sglang-python", type=Path, default=Path(sys.executable), metavar="PATH")
        one.add_argument("--model", type=Path, metavar="DIR", help="checkpoint that the engine serves")
        if name == "tiers":
            one.add_argument("--disk", type=Path, default=Path.cwd(), help="folder on the file system to be measured")
        if name == "serve":
            one.add_argument("--dtype", default="auto", help="float32 is the fastest on CPUs without AVX-512 or AMX")
            one.add_argument("--plot", type=Path, metavar="FILE.png", help="also write a picture")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    run, _ = BENCHES[given.name]
    try:
        found = run(given)
        if found is None:
            return
    except BenchError as error:
        print_error(str(error))
        raise SystemExit(1) from None
    if given.quick:
        found = found.without_verdicts()
    if given.json:
        given.json.write_text(found.to_json())
    print("\n".join(found.to_lines(f"{given.name} beside its peers", width())))
    print(f"\n{LEGENDS[given.name]}")
    if any(item.goal for item in found.rows):
        print("ok ?: a part of the goal was not measured.")


if __name__ == "__main__":
    main()
