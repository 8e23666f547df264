"""`bench serve URL`: a server that runs already, whatever it is, asked for prompts it cannot know, and again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import Answer, RequestFailed
from mooncake_connector.cli.bench.serve.client import Server, completion
from mooncake_connector.cli.bench.serve.load import Pass, run_pass
from mooncake_connector.cli.bench.serve.report import NEW, SEEN, ServeReport, row_of
from mooncake_connector.cli.bench.serve.workload import Prompt, Workload, text_prompts, words

_PROBE_WORDS = 50
_TOKENS_PER_WORD = 1.3
"""Where the server does not say how many tokens a prompt has."""


def run(server: Server, model: str | None, work: Workload, limit_s: float, progress: Progress) -> ServeReport:
    """Measure. Raises BenchError where the server cannot be used; failed requests are in the report."""
    name, longest = choose_model(server, model)
    if longest is not None:
        work.check_fits(longest, "the server's max_model_len of")
    machine = describe_machine(Path(tempfile.gettempdir()))
    options, tokens_per_word = _try_out(server, name, work, limit_s)

    def ask(prompt: Prompt) -> Answer:
        return server.stream(_body(name, prompt, work.answer_tokens, options), limit_s)

    passes: dict[str, list[Pass]] = {NEW: [], SEEN: []}
    right: list[list[Answer | None]] = []
    for number in range(1, work.rounds + 1):
        progress(f"{server.url}: round {number} of {work.rounds}")
        prompts = text_prompts(work, tokens_per_word, f"round {number}")
        order = work.order(f"round {number}")
        first = [order.index(prefix) for prefix in range(work.prefixes)]
        new = run_pass(server, ask, [prompts[index] for index in first], work.concurrency)
        answers = dict(zip(first, new.answers, strict=True))
        right.append([answers.get(index) for index in range(len(prompts))])
        passes[NEW].append(new)
        passes[SEEN].append(run_pass(server, ask, prompts, work.concurrency))
        if all(answer is None for item in passes[NEW] for answer in item.answers):
            raise BenchError(f"{server.url}: every request failed: {passes[NEW][0].reason}")
    machine["load_1min_at_the_end"] = round(os.getloadavg()[0], 2)
    settings: dict[str, str | int | float | None] = {
        **{field: getattr(work, field) for field in work.__slots__},
        "url": server.url,
        "model": name,
        "prompt_tokens_seen": _longest_prompt(passes),
    }
    rows = [row_of(server.url, NEW, passes[NEW], None), row_of(server.url, SEEN, passes[SEEN], right)]
    return ServeReport(machine, describe_versions(), settings, rows, [])


def choose_model(server: Server, wanted: str | None) -> tuple[str, int | None]:
    """The name to ask for and, where the server says, the longest request it takes. Raises BenchError."""
    try:
        status, kind, content = server.get("/v1/models")
    except RequestFailed as error:
        raise BenchError(f"{server.url}: {error}: is the server up, and is this its address?") from error
    if status in (401, 403):
        given = "the key it was given is not taken" if server.api_key else "it asks for a key"
        raise BenchError(f"{server.url} answered {status}: {given}: set OPENAI_API_KEY, or --api-key")
    if status == 404 and wanted is not None:
        return wanted, None
    hint = "give the address of an OpenAI-compatible server, without the path of a page"
    if status != 200:
        raise BenchError(f"{server.url}/v1/models answered {status}: {hint}, and --served-model-name if it lists none")
    try:
        listed = {str(item["id"]): item.get("max_model_len") for item in json.loads(content)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BenchError(f"{server.url}/v1/models answered with {kind} that lists no models: {hint}") from error
    if wanted is not None and wanted not in listed:
        raise BenchError(f"{server.url} has no model {wanted!r}: it has {', '.join(listed) or 'none'}")
    if wanted is None and len(listed) != 1:
        raise BenchError(f"{server.url} has {len(listed)} models, name one by --served-model-name: {', '.join(listed)}")
    name = wanted or next(iter(listed))
    longest = listed[name]
    return name, longest if isinstance(longest, int) else None


def _try_out(server: Server, model: str, work: Workload, limit_s: float) -> tuple[dict[str, Any], float]:
    """What to leave out of a request so that this server takes it, and how many tokens one of our words has."""
    count = max(1, min(_PROBE_WORDS, work.prefix_tokens // 8))  # never longer than what is measured, in any tokens
    prompt = " ".join(words(count, f"{work.seed}/probe"))
    options: dict[str, Any] = {}
    try:
        answer = server.stream(_body(model, prompt, 1, options), limit_s)
    except RequestFailed as error:
        if error.status not in (400, 422):
            raise BenchError(f"{server.url}: the first request failed: {error}") from error
        options = {"stream_options": None}
        try:
            answer = server.stream(_body(model, prompt, 1, options), limit_s)
        except RequestFailed as second:
            raise BenchError(f"{server.url}: the first request failed: {second}") from second
    tokens_per_word = answer.prompt_tokens / count if answer.prompt_tokens else _TOKENS_PER_WORD
    return options, min(max(tokens_per_word, 0.5), 20.0)


def _body(model: str, prompt: Prompt, max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    body = {**completion(model, prompt, max_tokens), **options}
    return {name: value for name, value in body.items() if value is not None}


def _longest_prompt(passes: dict[str, list[Pass]]) -> int | None:
    counts = [answer.prompt_tokens for item in passes[NEW] for answer in item.answers if answer is not None]
    return max((count for count in counts if count is not None), default=None)
