"""Fixtures for PD on real SGLang servers: one pair of instances, which all tests share, and the routers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from e2e.pd.chat import draw_letters
from e2e.pd_sglang.instances import KINDS, LIMIT_S, Instance, Router
from e2e.process import assert_no_complaints, running
from e2e.questions import Examiner, Question
from e2e.sglang_server import ONE_CORE, PAGE_TOKENS, SGLangServer
from models import checkpoint

CHUNK_TOKENS = 256
LENGTHS = {
    "short": 40,
    "pages": 4 * PAGE_TOKENS,
    "several": 450,
    "chunks": 600,
    **{f"crowd {number}": 130 + 41 * number for number in range(4)},
}
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
COMMON = ("--chat-template", str(CHAT_TEMPLATE))


@dataclass(frozen=True, slots=True)
class Chat:
    """What a user says, and what plain SGLang answers: text, and the log-probability of each token."""

    said: str
    answer: str
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions for the Qwen3 checkpoint by name, answered by one SGLang server without any cache."""

    questions: dict[str, Question]
    chat: Chat

    def __getitem__(self, name: str) -> Question:
        return self.questions[name]

    @property
    def crowd(self) -> list[Question]:
        return [question for name, question in self.questions.items() if name.startswith("crowd")]


@dataclass
class Pair:
    """A prefill and a decode instance, and the routers between them, started when they are first asked for."""

    prefill: Instance
    decode: Instance
    logs: Path
    secret: Path
    stack: ExitStack = field(default_factory=ExitStack)
    routers: dict[str, Router] = field(default_factory=dict)

    @property
    def instances(self) -> tuple[Instance, Instance]:
        return self.prefill, self.decode

    def router(self, kind: str) -> Router:
        if kind not in self.routers:
            router = Router(kind, self.prefill, self.decode, log=self.logs / f"pd-sglang-{kind}.log")
            self.routers[kind] = self.stack.enter_context(running(router))
        self.routers[kind].wait_until_ready(deadline_s=LIMIT_S)
        return self.routers[kind]

    def forget(self) -> None:
        """Both run, have no fault and no KV of an earlier request."""
        for instance in self.instances:
            instance.heal()
            if not instance.is_running:  # a test failed between a crash and the restart
                instance.restart()
            instance.holds_nothing()

    def close(self) -> None:
        """Stop everything; raise AssertionError if a process has logged an exception."""
        self.stack.close()
        assert_no_complaints([*self.instances, *self.routers.values()])


def make_secret(folders: pytest.TempPathFactory, secret: str) -> Path:
    file = folders.mktemp("secret") / "secret"
    file.touch(mode=0o600)
    file.write_text(secret)
    return file


def reached(secret: Path) -> dict[str, object]:
    """The configuration of an instance that talks over TCP alone."""
    return {"transfer_hosts": "127.0.0.1", "secret_file": secret, "transports": "tcp"}


@pytest.fixture(scope="session")
def launched(
    qwen3: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory, stops: dict[str, Callable[[], None]]
) -> Pair:
    """Both begin to start. KV and control travel over TCP, with a secret."""
    secret = make_secret(tmp_path_factory, "as long as it has to be, and longer")
    config = reached(secret) | {"log_requests": "true"}
    chunks = ("--chunked-prefill-size", str(CHUNK_TOKENS))
    pair = Pair(
        Instance(qwen3, "prefill", log=logs / "pd-sglang-prefill.log", config=config, args=(*COMMON, *chunks)),
        Instance(qwen3, "decode", log=logs / "pd-sglang-decode.log", config=config, args=COMMON),
        logs,
        secret,
    )
    stops["launched"] = pair.close
    for instance in pair.instances:
        pair.stack.callback(instance.stop)
        instance.start()
    return pair


@pytest.fixture(scope="session")
def asked(launched: Pair, qwen3: Path, logs: Path) -> Asked:
    """Answered while the pair starts."""
    plain = SGLangServer(qwen3, log=logs / "pd-sglang-plain.log", way="plain", args=COMMON, env=ONE_CORE)
    with running(plain):
        examiner = Examiner(plain)
        questions = {name: examiner.question(name, length) for name, length in LENGTHS.items()}
        said = bytes(Examiner(plain, draw=draw_letters).question("chat", 300).prompt).decode()
        return Asked(questions, Chat(said, *plain.chat(said, max_tokens=6)))


@pytest.fixture(scope="session")
def started(launched: Pair, asked: Asked) -> Pair:
    for instance in launched.instances:
        instance.wait_until_ready()
    return launched


@pytest.fixture
def pair(started: Pair) -> Pair:
    started.forget()
    return started


@pytest.fixture
def misfit(
    pair: Pair, qwen3: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Instance]]:
    """Decode instances that differ from the pair in one thing; none may have logged an exception in the end."""
    made: list[Instance] = []

    def make(difference: str) -> Instance:
        is_secret = difference == "secret"
        secret = make_secret(tmp_path_factory, "another one, but long enough") if is_secret else pair.secret
        made.append(
            Instance(
                checkpoint("qwen3-other") if difference == "weights" else qwen3,
                "decode",
                log=logs / f"pd-sglang-{difference}.log",
                config=reached(secret),
                args=[*COMMON, *(("--page-size", "32") if difference == "pages" else ())],
            )
        )
        return made[-1]

    yield make
    assert_no_complaints(made)


@pytest.fixture(params=KINDS)
def router(pair: Pair, request: pytest.FixtureRequest) -> Router:
    return pair.router(request.param)
