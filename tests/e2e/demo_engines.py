"""`make demo-engines`: a real vLLM server answers a question about a long text, then SGLang from the pages of vLLM.

The two never run at the same time and share nothing but the pool. SGLang is asked twice: under a cache salt of its own,
where it has to compute the prompt, and as vLLM was, where it takes the prompt from the pool.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rich.table import Table

from e2e.client import Answer, ServerError
from e2e.demo import LOGS, MAX_TOKENS, QUESTION, TEXT, chat, console, show_piece, step, stored_pages
from e2e.pages import PAGE_TOKENS, wait_for
from e2e.process import ServerDied, pool_folder, running
from e2e.server import Server
from e2e.sglang_server import SGLangAnswer, SGLangServer
from models import checkpoint


def main() -> int:
    started = time.monotonic()
    try:
        with step("make the SmolLM2-135M checkpoint"):
            model = checkpoint("smollm2")
        with pool_folder() as pool:
            theirs = vllm_computes(model, pool)
            cold, warm = sglang_answers(model, pool)
    except (AssertionError, ServerDied, ServerError) as error:
        return fail(str(error))
    show(theirs, cold, warm)
    console.print(f"took {time.monotonic() - started:.0f} s")
    return conclude(theirs, cold, warm)


def vllm_computes(model: Path, pool: Path) -> Answer:
    server = Server(model, log=LOGS / "demo-engines-vllm.log", pool=pool, args=["--max-model-len", "4096"])
    with contextlib.ExitStack() as stack:
        with step("start vLLM"):
            stack.enter_context(running(server))
        server.ask(chat("Say hello."), max_tokens=4)
        answer = ask(server, "vLLM computes")
        pages = answer.prompt_tokens // PAGE_TOKENS
        with step(f"wait until the pool has the prompt's {pages} pages"):
            wait_for(lambda: stored_pages(pool) >= pages, f"{pages} pages in the pool {pool}\n{server.log_tail()}")
        with step("stop vLLM"):
            stack.close()
    return answer


def sglang_answers(model: Path, pool: Path) -> tuple[SGLangAnswer, SGLangAnswer]:
    server = SGLangServer(model, log=LOGS / "demo-engines-sglang.log", pool=pool)
    with contextlib.ExitStack() as stack:
        with step("start SGLang"):
            stack.enter_context(running(server))
        server.ask(chat("Say hello."), max_tokens=4)
        cold = ask(server, "SGLang computes, under a cache salt of its own", cache_salt="demo")
        warm = ask(server, "SGLang answers from the pool")
        with step("stop SGLang"):
            stack.close()
    return cold, warm


def ask(server: Server | SGLangServer, how: str, **fields: str) -> Answer | SGLangAnswer:
    console.print(f"  {how}: {QUESTION}\n  [dim]>[/dim] ", end="")
    prompt = chat(f"{TEXT}\n\n{QUESTION}")
    answer = server.ask(prompt, max_tokens=MAX_TOKENS, ignore_eos=False, on_text=show_piece, **fields)
    console.print(f"\n  first token after {answer.ttft_s:.2f} s")
    return answer


def show(theirs: Answer, cold: SGLangAnswer, warm: SGLangAnswer) -> None:
    table = Table(title="One prompt, computed by vLLM, read by SGLang")
    for column in ("", "vLLM", "SGLang computes", "SGLang reads"):
        table.add_column(column, justify="right" if column else "left")
    answers = (theirs, cold, warm)
    table.add_row("prompt tokens", *(str(answer.prompt_tokens) for answer in answers))
    table.add_row("not computed", *(str(answer.cached_tokens) for answer in answers))
    table.add_row("time to first token", *(f"{answer.ttft_s:.3f} s" for answer in answers))
    table.add_row("text as vLLM's", "", *(yes(answer.text == theirs.text) for answer in (cold, warm)))
    table.add_row("text as SGLang computes it", yes(theirs.text == cold.text), "", yes(warm.text == cold.text))
    console.print(table)


def conclude(theirs: Answer, cold: SGLangAnswer, warm: SGLangAnswer) -> int:
    """Print the last line; the exit status is 0 only if SGLang hit vLLM's pages and answers as it does without.

    vLLM itself may say it in other words: the engines' kernels round differently, so on some processors a near tie
    between two tokens goes the other way.
    """
    if warm.from_storage == 0:
        return fail(f"SGLang took nothing from the pool; see {LOGS / 'demo-engines-sglang.log'}")
    if theirs.cached_tokens or cold.cached_tokens:
        return fail(f"vLLM and SGLang should have computed all, not found {theirs.cached_tokens}, {cold.cached_tokens}")
    if warm.text != cold.text:
        return fail(f"the texts differ:\n  SGLang computes: {cold.text!r}\n  SGLang reads: {warm.text!r}")
    print(
        f"demo-engines: OK hit_tokens={warm.from_storage} ttft_cold_s={cold.ttft_s:.3f} "
        f"ttft_warm_s={warm.ttft_s:.3f} same_text=yes",
        flush=True,
    )
    return 0


def fail(reason: str) -> int:
    print(f"demo-engines: FAILED {reason}", flush=True)
    return 1


def yes(same: bool) -> str:
    return "yes" if same else "no"


if __name__ == "__main__":
    LOGS.mkdir(parents=True, exist_ok=True)
    sys.exit(main())
