"""`mooncake-connector up`: prefill and decode instances and a router, from one file."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.checks import Check, Verdict, entry_point
from mooncake_connector.cli.doctor import pool_checks, print_check
from mooncake_connector.cli.doctor_transfers import transfer_checks
from mooncake_connector.cli.output import EXIT_FAILED, fail, typed_path
from mooncake_connector.cli.up_board import Board, welcome
from mooncake_connector.config.sources import load_config
from mooncake_connector.deploy import checks, docs
from mooncake_connector.deploy.commands import Command, commands, typed
from mooncake_connector.deploy.file import read_deployment
from mooncake_connector.deploy.render import compose, kubernetes
from mooncake_connector.deploy.schema import Deployment, folder_of
from mooncake_connector.deploy.supervisor import Supervisor
from sglang_backend import KNOWN_VERSION as SGLANG_VERSION
from vllm_plugin.doctor import KNOWN_VERSION as VLLM_VERSION

_PLUGINS = {
    "vllm": ("vllm.general_plugins", "vllm_plugin:register", "VLLM_PLUGINS"),
    "sglang": ("sglang.srt.plugins", "sglang_backend:register", "SGLANG_PLUGINS"),
}
_FORMS = {"compose": compose.render, "k8s": kubernetes.render, "rbg": kubernetes.render_group}
_TICK_S = 0.2
_KNOWN = {"vllm": VLLM_VERSION, "sglang": SGLANG_VERSION}


def up(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", parser=typed_path, help="The deployment file, in YAML.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check; exit code 1 where something fails.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Only print the commands, for a shell.")] = False,
    render: Annotated[
        str | None, typer.Option("--render", metavar="|".join(_FORMS), help="Only print it as files of another system.")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Only print the JSON Schema of FILE, for editors.")] = False,
) -> None:
    """Run prefill and decode instances and a router, as FILE says, until Ctrl-C.

    \b
    Examples:
      mooncake-connector up deployment.yaml --check
      mooncake-connector up deployment.yaml
    """
    if schema:
        typer.echo(docs.schema_text(), nl=False)
        return
    if file is None:
        raise typer.BadParameter("name the deployment file", param_hint="FILE")
    if check + print_ + (render is not None) > 1:
        raise typer.BadParameter("give one of --check, --print and --render")
    if render is not None and render not in _FORMS:
        raise typer.BadParameter(f"{render!r}: expected one of {', '.join(_FORMS)}", param_hint="--render")
    deployment = read_deployment(file, for_containers=render is not None)
    if render is not None:
        typer.echo(_FORMS[render](deployment, file, _KNOWN[deployment.engine]), nl=False)
        return
    run = commands(deployment, file)
    if print_:
        for command in run:
            typer.echo(f"# {command.name}, {command.url}\n{typed(command)}\n")
        return
    if not _check(deployment, file, run):
        raise typer.Exit(EXIT_FAILED)
    if not check:
        typer.echo()
        _run(deployment, file, run)


def _run(deployment: Deployment, file: Path, run: Sequence[Command]) -> None:
    """Until somebody ends it, which is the ordinary end, or nothing can be answered any more."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` wants it to go on
            signal.signal(number, lambda one, frame: asked.append(one))
    needs_prefill = deployment.engine == "sglang" and deployment.prefill.count
    roles = {"prefill", "decode", "router"} if needs_prefill else {"decode", "router"}
    with Board(deployment.engine) as board:
        supervisor = Supervisor(
            run,
            engine=deployment.engine,
            needed=roles,
            logs=folder_of(deployment.logs, file),
            start_at_once=deployment.start_at_once,
            start_deadline_s=deployment.start_deadline_s,
            silence_deadline_s=deployment.silence_deadline_s,
            say=board.say,
        )
        try:
            greeted = False
            while not asked and supervisor.failure is None:
                supervisor.tick()
                board.show(supervisor.processes)
                if supervisor.is_ready and not greeted:
                    greeted = True
                    board.say(welcome(run))
                time.sleep(_TICK_S)
        finally:
            board.say("stopping; once more to stop at once" if asked else "stopping")
            supervisor.stop(lambda: len(asked) > 1)
        board.say("all processes have ended")
    if supervisor.failure is not None:
        fail(supervisor.failure)


def _check(deployment: Deployment, file: Path, run: Sequence[Command]) -> bool:
    """Whether nothing fails; each check is printed."""
    healthy = True
    for found in deployment_checks(deployment, file, run):
        print_check(found)
        healthy &= found.status is not Verdict.FAILED
    return healthy


def deployment_checks(deployment: Deployment, file: Path, run: Sequence[Command]) -> Iterator[Check]:
    engine = deployment.engine
    yield checks.engine_check(engine, _KNOWN[engine])
    group, value, variable = _PLUGINS[engine]
    chosen = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    yield entry_point(group, "mooncake_connector", value, chosen or None, variable)
    yield checks.model_check(deployment.model, file)
    yield checks.ports_check(run)
    if deployment.router.conductor.index is not None:
        yield from checks.events_check(run)
    yield from checks.memory_check(deployment, file)
    yield from _settings_checks(deployment, run)
    yield checks.router_check(deployment.router.kind)
    yield checks.logs_check(folder_of(deployment.logs, file))


def _settings_checks(deployment: Deployment, run: Sequence[Command]) -> Iterator[Check]:
    """The pool and transfers, with the settings in force at the first instance, one of prefill where there is any."""
    config = load_config(None, {**os.environ, **run[0].env})
    if deployment.engine == "vllm" and config.prefix_reuse:
        yield from pool_checks(config)
    yield from transfer_checks(config)
