"""Secret and certificates, as they are configured: instances that share them hand over, others compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from certificates import CAN_MAKE, make_certificate
from pd import PROMPT, MakePair, every_order, figures

pytestmark = pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")
NUM_TOKENS = len(PROMPT)


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings of a deployment with a secret and TLS, and of instances that are not of it."""

    def secret(text: str) -> dict[str, Any]:
        file: Path = tmp_path_factory.mktemp("secret") / "secret"
        file.touch(mode=0o600)
        file.write_text(text)
        return {"secret_file": str(file), "transfer_hosts": ["127.0.0.1"]}

    def tls() -> dict[str, Any]:
        return {f"tls_{role}": file for role, file in make_certificate(tmp_path_factory.mktemp("tls")).items()}

    ours, certified = secret("long enough for the two of us"), tls()
    return {
        "ours": ours | certified,
        "no TLS": ours,
        "no secret": certified,
        "another secret": secret("long enough for somebody else") | certified,
        "another authority": ours | tls(),
        "neither": {},
    }


@every_order
def test_instances_of_one_deployment_hand_over(pair: MakePair, access: dict[str, dict[str, Any]], order: str) -> None:
    both = pair(transports=["tcp"], **access["ours"])
    both.ask(PROMPT, order=order, computed=1 + 2)
    sent = figures(both.prefill)
    assert sent["transports"] == {"tcp": sent["send_bytes"]}
    both.check_at_rest()


@pytest.mark.parametrize("stranger", ["no TLS", "no secret", "another secret", "another authority", "neither"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_stranger_gives_and_gets_nothing(
    pair: MakePair, access: dict[str, dict[str, Any]], stranger: str, side: str
) -> None:
    """That is found out at once, and the prompt is computed."""
    settings = {one: {"extra": access["ours"]} for one in ("prefill", "decode")} | {side: {"extra": access[stranger]}}
    both = pair(**settings, transfer_lease_s=1)
    name = both.add(PROMPT)
    both.finish(name)
    assert both.decode.computed(name) == NUM_TOKENS + 2
    assert figures(both.decode)["failures"] == {"fetch_failed": 1}
    assert figures(both.prefill).get("send_bytes", 0) == 0
