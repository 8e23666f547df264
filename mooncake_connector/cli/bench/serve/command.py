"""`mooncake-connector bench serve`: options, and what becomes of the report."""

from __future__ import annotations

import contextlib
import enum
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_connector.cli.bench.report import LEGEND_COLUMNS, say
from mooncake_connector.cli.columns import folded
from mooncake_connector.cli.output import Json, print_table, typed_path, width

if TYPE_CHECKING:
    from mooncake_connector.cli.bench.serve.report import ServeReport

_TITLE = "mooncake-connector bench serve"
_COMPARED = """\
new: every cache starts without these prompts, and fills while they are asked; seen: the same prompts again.
answers differ: greedy answers unlike those of vLLM alone to the new prompts; its row shows what another batch changes.
"""
_OF_ONE = """\
new: every prefix once, none of which the server has seen; seen: all requests, over the same prefixes.
answers differ: greedy answers to seen prompts unlike the first ones.
"""
_LEGEND = """\
TTFT: from the request to its first token, over all rounds. Tokens: prompt tokens by the server's own counters."""


class Dtype(str, enum.Enum):
    """What vLLM computes in and keeps its KV in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def serve(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="A running OpenAI-compatible server, of any engine.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            parser=typed_path, help="A checkpoint: start vLLM with it, alone and with this connector.", metavar="DIR"
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            help="For --model; on CPUs without AVX-512 or AMX float32 is several times faster than bfloat16.",
            metavar="TYPE",
        ),
    ] = Dtype.auto,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            parser=typed_path,
            help="Python that has vLLM and this package, for --model; default: this one.",
            metavar="PATH",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Which model of URL; default: its only one.", metavar="NAME")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key for URL.", metavar="KEY", show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests in a pass.")] = 64,
    prefixes: Annotated[int, typer.Option(min=1, max=10_000, help="Different prefixes.")] = 16,
    prefix_tokens: Annotated[int, typer.Option(min=16, max=1_000_000, help="Tokens of a prefix.")] = 1536,
    answer_tokens: Annotated[int, typer.Option(min=1, max=10_000, help="Tokens of an answer.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at a time.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds, each with prompts of its own.")] = 2,
    seed: Annotated[
        int | None, typer.Option(help="Of all prompts; default: 0, and a new one for each run against a URL.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds that one request may take.")] = 120,
    folder: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Where to put the temporary caches; default: /dev/shm.", metavar="DIR"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serving under cache pressure: requests per second and time to first token, with and without the connector.

    With --model, on this machine: vLLM alone and with this connector, both with the same cache in the engine, which
    holds a third of the prefixes, or more where --concurrency needs it. Your pool is not touched.

    With a URL, a server of yours: prompts that it has not seen, then the same prefixes again. Its caches will hold
    them.
    """
    # Not at the top: other commands should start without these.
    from mooncake_connector.cli.bench.machine import default_folder
    from mooncake_connector.cli.bench.serve import client, compare, engines, running
    from mooncake_connector.cli.bench.serve.workload import Workload

    if (url is None) == (model is None):
        raise typer.BadParameter("give either the URL of a server, or --model DIR", param_hint="URL")
    for_model = "it is for the servers that --model starts, and the server of a URL runs already: leave it out"
    for option, is_wrong, reason in (
        ("--dtype", url is not None and dtype is not Dtype.auto, for_model),
        ("--vllm-python", url is not None and vllm_python is not None, for_model),
        ("--folder", url is not None and folder is not None, for_model),
        ("--served-model-name", url is None and served_model_name is not None, "it is for a server with a URL"),
        ("--requests", requests < prefixes, f"{requests} requests cannot ask for {prefixes} prefixes"),
    ):
        if is_wrong:
            raise typer.BadParameter(reason, param_hint=option)
    if seed is None:
        seed = 0 if url is None else secrets.randbelow(1 << 31)  # its caches know none of the prompts
    work = Workload(
        requests, prefixes, prefix_tokens,
        answer_tokens=answer_tokens, concurrency=concurrency, rounds=rounds, seed=seed,
    )  # fmt: skip
    with ended_like_ctrl_c():
        if url is not None:
            report = running.run(client.parse_url(url, api_key or None), served_model_name, work, timeout, say)
        else:
            assert model is not None
            report = compare.run(
                vllm_python or Path(sys.executable), model, dtype.value, work, engines.OWN,
                folder or default_folder(), timeout, say,
            )  # fmt: skip
    show(report, as_json, url is None)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Whoever ends this process by a signal also ends the servers it has started."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    former = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN  # `nohup` keeps its meaning
    }
    for number in former:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def show(report: ServeReport, as_json: bool, compared: bool) -> None:
    from mooncake_connector.cli.bench.measure import BenchError

    for line in report.warnings():
        say(f"WARNING: {line}")
    try:
        if as_json:
            typer.echo(report.to_json())
        else:
            columns = width()
            print_table(report.to_lines(_TITLE, columns))
            typer.echo()
            legend = (_COMPARED if compared else _OF_ONE) + _LEGEND
            for line in (*report.absent_lines(), *legend.splitlines(), *report.context_lines()):
                for part in folded(line, columns or LEGEND_COLUMNS, more="  "):
                    typer.echo(part)
        sys.stdout.flush()
    except OSError as error:
        raise BenchError(f"the report cannot be written: {error.strerror}") from error
