"""`kv_transfer_params`: whatever a client sends, a leg or an ordinary request comes of it, and it is answered."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cases import Start
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pd import PD_ONLY, PROMPT, port_of, prefill_params, run_all

from mooncake_connector.config.sources import load_config
from mooncake_connector.kv.namespace import Namespace
from transfer.protocol.messages import MAX_NAME_LENGTH
from transfer.session import NodeOptions
from vllm_plugin.pd.params import DecodeRequest, PrefillRequest, answer_params, parse_params, transfer_name

LEG = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 9}


def namespace(**changes: Any) -> Any:
    class Fake:
        digest = changes.get("digest", b"n" * 32)

    return Fake()


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"do_remote_prefill": False}, {"do_remote_decode": None}])
def test_ordinary_requests(params: Any) -> None:
    assert parse_params(params) is None


def test_a_prefill_leg_makes_a_transfer_of_its_own_or_takes_the_proxys() -> None:
    first, second = parse_params(prefill_params()), parse_params(prefill_params())
    assert isinstance(first, PrefillRequest) and isinstance(second, PrefillRequest) and first != second
    assert parse_params(prefill_params("given")) == PrefillRequest("given")


def test_a_decode_leg_is_what_the_prefill_leg_answered() -> None:
    answer = answer_params(
        PrefillRequest("t"), name="t:digest", request_id="r", block_ids=[[1, 2]], num_tokens=20, engine_id="e",
        host="h", port=7, tp_size=2, pp_size=1,
    )  # fmt: skip
    leg = parse_params(msgspec.json.decode(msgspec.json.encode(answer)))
    assert isinstance(leg, DecodeRequest)
    assert (leg.transfer_id, leg.where.host, leg.where.port, leg.where.engine_id, leg.computed, leg.name) == (
        "t", "h", 7, "e", True, "t:digest",
    )  # fmt: skip


def test_in_the_concurrent_order_nobody_has_computed_yet() -> None:
    leg = parse_params(LEG)
    assert isinstance(leg, DecodeRequest)
    assert (leg.where.engine_id, leg.computed) == ("", False)
    text = parse_params(LEG | {"remote_port": "9"})
    assert text == leg


@pytest.mark.parametrize("value", ["", 7, "x" * 257, "\ud800"])
def test_an_answer_with_a_name_that_cannot_be_makes_an_ordinary_request(value: Any) -> None:
    assert parse_params(LEG | {"transfer_name": value}) is None


@pytest.mark.parametrize("key", ["transfer_id", "remote_host", "remote_port"])
@pytest.mark.parametrize("value", [None, "", 0, -1, 65536, 1.5, True, [], {}, "x" * 300, "\ud800", "a\nb", "99999"])
def test_a_value_that_cannot_be_makes_an_ordinary_request(key: str, value: Any) -> None:
    if (key, value) == ("remote_host", "99999") or (key, value) == ("transfer_id", "99999"):
        assert parse_params(LEG | {key: value}) is not None
    else:
        assert parse_params(LEG | {key: value}) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(st.characters(), max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
likely = st.sampled_from(["x", "127.0.0.1", "9", 9, True, None, "\ud800", "\x00"])
KEYS = ["do_remote_decode", "do_remote_prefill", "transfer_id", "remote_host", "remote_port", "remote_engine_id"]
KEYS += ["remote_request_id", "remote_block_ids", "transfer_name"]
dictionaries = st.dictionaries(st.sampled_from(KEYS), likely | anything)


@settings(max_examples=300)
@given(dictionaries)
@example({"do_remote_prefill": True, "transfer_id": "\ud800", "remote_host": "h", "remote_port": 1})
def test_any_dictionary_makes_a_leg_that_can_be_sent_or_none(params: dict[str, Any]) -> None:
    leg = parse_params(params)
    if leg is not None:
        name = transfer_name(leg.transfer_id, namespace(), b"root", [1, 2])
        assert 0 < len(name) <= MAX_NAME_LENGTH
        msgspec.msgpack.encode(name)
    if isinstance(leg, DecodeRequest):
        assert 0 < leg.where.port < 65536 and leg.where.host.encode()


def test_the_name_depends_on_all_that_kv_depends_on() -> None:
    def name(transfer_id: str = "t", digest: bytes = b"n", root: bytes = b"r", tokens: Any = (1, 2)) -> str:
        return transfer_name(transfer_id, namespace(digest=digest), root, tokens)

    names = [name(), name("u"), name(digest=b"m"), name(root=b"s"), name(tokens=(1, 3)), name(tokens=(1,))]
    names += [name(digest=b"nr", root=b""), name(tokens=(1, 2, 0))]
    assert len(set(names)) == len(names)
    assert name() == name(tokens=[1, 2])


def test_an_engine_answers_whatever_the_parameters_are(start: Start) -> None:
    """One engine, many requests: each is answered as if alone, and nothing is left over."""
    engine = start(extra=PD_ONLY | {"transfer_deadline_s": 0.2, "transfer_lease_s": 1})
    own = {"remote_port": port_of(engine), "remote_host": "127.0.0.1"}

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(dictionaries, st.booleans())
    @example(LEG | {"transfer_id": "\ud800"}, True)
    @example(LEG | {"remote_host": "\ud800"}, False)
    @example(LEG | {"remote_host": "a..b"}, False)
    @example(LEG | {"remote_host": "-" * 64}, False)
    def check(params: dict[str, Any], reachable: bool) -> None:
        name = engine.add(PROMPT, 2, params=params | own if reachable else params)
        run_all(engine, until=lambda: name in engine.reasons)
        engine.check_answer(name)

    check()
    engine.finish()


def test_the_namespace_of_a_name_is_the_real_one() -> None:
    """The stand-in above has what `transfer_name` reads."""
    assert "digest" in dir(Namespace)


def test_where_clients_send_us_makes_few_lines_in_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """The log has room for so many causes; whoever may send requests must not use it up."""
    engine = start(extra=PD_ONLY)
    for number in range(8):
        where = {"remote_host": f"127.0.0.{number + 2}", "remote_engine_id": f"{number}", "transfer_id": f"{number}"}
        engine.add(PROMPT, 1, params=LEG | where)
    for letter in "abcdef":
        engine.add(PROMPT, 1, params=LEG | {"remote_host": f"{letter}::", "transfer_id": letter})
    run_all(engine)
    said = [record.getMessage() for record in caplog.records if "a transfer failed" in record.getMessage()]
    assert len(said) == 2, said
    engine.check_at_rest()


def test_instances_may_have_different_leases() -> None:
    """Each keeps the other's with its own heartbeats, which have to come several times in any but the shortest."""
    for lease_s in (5.0, 30.0, 3600.0):
        assert 4 * NodeOptions.configured(load_config({"transfer_lease_s": lease_s}, {})).timing.heartbeat_s <= 5
    assert 4 * NodeOptions.configured(load_config({"transfer_lease_s": 1.0}, {})).timing.heartbeat_s <= 1


def test_a_prefill_instance_holds_kv_for_as_long_as_it_is_told_to() -> None:
    for settings_s in ({"transfer_lease_s": 600.0}, {"transfer_deadline_s": 600.0}):
        assert NodeOptions.configured(load_config(settings_s, {})).timing.hold_s >= 600
    assert NodeOptions.configured(load_config({}, {})).timing.hold_s == 300
