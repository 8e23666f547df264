"""Two instances of a model with sliding windows, or with states, answer as one does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from long_form import LONG

from e2e.pages import wait_for
from e2e.pd.conftest import BOUNDS, LEASE_S, ORDERS, STEADY
from e2e.pd.fleet import Fleet, Group
from e2e.pd.instances import Instance
from e2e.questions import SMALLEST_GAP, Examiner
from models import checkpoint

LENGTHS = {"below a block": 100, "some": 385, "many": 700}

MODELS: dict[str, tuple[tuple[str, ...], float]] = {
    "gemma3": ((), SMALLEST_GAP),
    "qwen3-next": (("--dtype", "bfloat16"), 0.1),
    "gpt-oss": ((), SMALLEST_GAP),
    "cohere2": ((), SMALLEST_GAP),
}
"""Arguments, and how far ahead the best token of each step has to be: GDN computes in nothing else on the CPU."""
SHORT = ("gemma3", "qwen3-next")
"""Windows, and states. Two servers take a minute to start."""


@pytest.fixture(params=MODELS if LONG else SHORT)
def hybrid(request: pytest.FixtureRequest, fleet: Fleet, logs: Path) -> Group:
    """A prefill and a decode instance, which have nothing cached."""

    def make() -> Group:
        args, _ = MODELS[request.param]
        config = {**BOUNDS, "transfer_deadline_s": 60, "transfer_lease_s": LEASE_S}
        instances = [
            Instance(
                checkpoint(request.param),
                log=logs / f"pd-{request.param}-{number}.log",
                pool=logs / "no-pool",
                config=config,
                args=["--max-model-len", "1024", "--max-num-batched-tokens", str(chunk), *args],
                env=STEADY,
            )
            for number, chunk in enumerate((256, 1024))
        ]
        return Group(instances, logs)

    return fleet.use(f"hybrid {request.param}", make)


def _has_fetched(decode: Instance, num_tokens: float) -> bool:
    return decode.figure("fetched_tokens") == num_tokens


@pytest.mark.slow
@pytest.mark.long
def test_two_instances_answer_as_one_in_both_orders(hybrid: Group) -> None:
    """In chunks of 256 tokens, and layer by layer; and what travels with wrong bytes changes the text."""
    prefill, decode = hybrid.instances
    examiner = Examiner(decode, smallest_gap=MODELS[decode.model.name][1])
    questions = [examiner.question(name, length) for name, length in LENGTHS.items()]
    for order in ORDERS:
        hybrid.forget()
        for question in questions:
            expected = decode.figure("fetched_tokens") + len(question.prompt) - 1
            proxy = hybrid.proxy([prefill], [decode], order=order)
            assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
            is_fetched = partial(_has_fetched, decode, expected)
            wait_for(is_fetched, "the prompt's KV fetched, in the metrics")
    hybrid.forget()
    prefill.fault("falsify")
    answer = hybrid.proxy([prefill], [decode]).ask_whole(question.prompt, max_tokens=len(question.answer))
    assert prefill.saw("falsify")
    assert answer != question.answer
    hybrid.forget()
    for instance in hybrid.instances:
        instance.holds_no_block()
