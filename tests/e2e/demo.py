"""`make demo`: a real vLLM server answers a question about a long text, is stopped, and its successor answers it again.

The second life reads the prompt's KV cache from the pool that the first one left, so it starts to answer sooner; the
text is the same. The pool lies in a folder of its own in /dev/shm and is gone at the end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from e2e.client import Answer, ServerError
from e2e.pages import PAGE_TOKENS, wait_for
from e2e.process import ServerDied, pool_folder, running
from e2e.server import Server
from models import checkpoint
from store_client import EmbeddedStore

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".cache" / "logs"
TEXT = (ROOT / "LICENSE").read_text()  # 2,200 tokens
# Of the questions tried, this one's answer has the widest margin at every step: rounding cannot change its text.
QUESTION = "In one sentence: what is this document?"
MAX_TOKENS = 20

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Life:
    """What one life of the server answered, and how many prompt tokens it took from the pool."""

    answer: Answer
    hit_tokens: int


def main() -> int:
    started = time.monotonic()
    try:
        with step("make the SmolLM2-135M checkpoint"):
            model = checkpoint("smollm2")
        with pool_folder() as pool:
            cold = live(model, pool, "first", wait_for_save=True)
            warm = live(model, pool, "second", wait_for_save=False)
    except (AssertionError, ServerDied, ServerError) as error:
        return fail(str(error))
    show(cold, warm)
    console.print(f"took {time.monotonic() - started:.0f} s")
    return conclude(cold, warm)


def live(model: Path, pool: Path, which: str, *, wait_for_save: bool) -> Life:
    """Start a server on `pool`, ask it the question, stop it."""
    args = ["--max-model-len", "4096"]
    server = Server(model, log=LOGS / f"demo-{which}.log", pool=pool, args=args)
    with contextlib.ExitStack() as stack:
        with step(f"start the {which} server"):
            stack.enter_context(running(server))
        with step("warm it up with a short unrelated prompt"):
            server.ask(chat("Say hello."), max_tokens=4)
        console.print(f"  ask about a text of {len(TEXT):,} characters: {QUESTION}")
        answer = ask(server)
        if wait_for_save:
            pages = answer.prompt_tokens // PAGE_TOKENS
            with step(f"wait until the pool has the prompt's {pages} pages"):
                wait_for(lambda: stored_pages(pool) >= pages, f"{pages} pages in the pool {pool}\n{server.log_tail()}")
        else:
            with contextlib.suppress(AssertionError):  # no hit is reported at the end, beside everything else
                wait_for(lambda: server.tokens_from_connector() > 0, "a hit", deadline_s=60)
        hit_tokens = server.tokens_from_connector()
        with step(f"stop the {which} server"):
            stack.close()
    return Life(answer, hit_tokens)


def ask(server: Server) -> Answer:
    console.print("  [dim]>[/dim] ", end="")
    answer = server.ask(chat(f"{TEXT}\n\n{QUESTION}"), max_tokens=MAX_TOKENS, ignore_eos=False, on_text=show_piece)
    console.print(f"\n  first token after {answer.ttft_s:.2f} s")
    return answer


def chat(message: str) -> str:
    """The prompt format that SmolLM2-Instruct was trained on."""
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def show_piece(text: str) -> None:
    console.print(text, end="", markup=False, style="green")


def stored_pages(pool: Path) -> int:
    with EmbeddedStore(pool) as store:
        return store.stats().pages


def show(cold: Life, warm: Life) -> None:
    table = Table(title="One prompt, asked before and after a restart")
    for column in ("", "first life", "second life"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("prompt tokens", str(cold.answer.prompt_tokens), str(warm.answer.prompt_tokens))
    table.add_row("taken from the pool", str(cold.hit_tokens), str(warm.hit_tokens))
    table.add_row("time to first token", f"{cold.answer.ttft_s:.3f} s", f"{warm.answer.ttft_s:.3f} s")
    table.add_row("speed-up", "", f"{cold.answer.ttft_s / warm.answer.ttft_s:.1f} x")
    table.add_row("same text", "", same_text(cold, warm))
    console.print(table)


def same_text(cold: Life, warm: Life) -> str:
    return "yes" if cold.answer.token_ids == warm.answer.token_ids else "no"


def conclude(cold: Life, warm: Life) -> int:
    """Print the last line; the exit status is 0 only if the second life hit and gave the first one's text."""
    if warm.hit_tokens == 0:
        return fail(f"the second server took nothing from the pool; see {LOGS / 'demo-second.log'}")
    if cold.hit_tokens != 0:
        return fail(f"the first server took {cold.hit_tokens} tokens from a pool that should have been empty")
    if same_text(cold, warm) == "no":
        return fail(f"the texts differ:\n  first:  {cold.answer.text!r}\n  second: {warm.answer.text!r}")
    print(
        f"demo: OK hit_tokens={warm.hit_tokens} ttft_cold_s={cold.answer.ttft_s:.3f} "
        f"ttft_warm_s={warm.answer.ttft_s:.3f} same_text=yes",
        flush=True,
    )
    return 0


def fail(reason: str) -> int:
    print(f"demo: FAILED {reason}", flush=True)
    return 1


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is being done while it is done, and how long it took."""
    started = time.monotonic()
    with waiting(what):
        yield
    console.print(f"  {what}: {time.monotonic() - started:.1f} s")


def waiting(what: str) -> contextlib.AbstractContextManager[object]:
    """A spinner on a terminal; elsewhere one line, so that a log shows what is going on."""
    if console.is_terminal:
        return console.status(f"{what} ...")
    console.print(f"  {what} ...")
    return contextlib.nullcontext()


if __name__ == "__main__":
    LOGS.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
