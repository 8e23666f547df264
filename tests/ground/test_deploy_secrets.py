"""What is kept out of rendered files, and that each process gets its own again."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples

from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.render.containers import Secrets, contained

SECRETS = ["one", "two", "3"]


@given(
    envs=st.lists(
        st.dictionaries(
            st.sampled_from(["API_KEY", "API_KEY_DECODE", "HF_TOKEN", "secret", "A_PASSWORD"]), st.sampled_from(SECRETS)
        ),
        min_size=4,
        max_size=4,
    ),
    words=st.lists(
        st.lists(
            st.sampled_from(
                ["--api-key", "--hf-token=one", "--x.a-password=two", "--secret", *SECRETS, "-dp", "--x", "$"]
            )
        ),
        min_size=4,
        max_size=4,
    ),
)
@settings(max_examples=examples(100))
def test_every_process_gets_its_own_secrets(envs, words):
    """Whatever references stand for, filled in from one place for all, is what `up` would have run."""
    secrets = Secrets()
    names = ("prefill-0", "prefill-1", "decode-0", "router")
    run = [
        Command(name, name.partition("-")[0], ("x", *more), env, "", ())
        for name, env, more in zip(names, envs, words, strict=True)
    ]
    made = [contained(one, "$({})".format, {}, secrets) for one in run]
    assert "secret" not in secrets.values  # what all instances share is called so
    for one, was in zip(made, run, strict=True):
        env = {name: text.replace("$$", "$") for name, text in one.env.items()}
        env |= {name: secrets.values[key] for name, key in one.secrets.items()}
        assert {name: env[name] for name in was.env} == was.env
        found = [re.sub(r"\$\((\w+)\)", lambda name, env=env: env[name[1]], word) for word in one.arguments]
        assert tuple(word.replace("$$", "$") for word in found) == was.arguments
        assert all(re.fullmatch(r"[A-Za-z_]\w*", key) for key in one.secrets.values())


@pytest.mark.parametrize(
    "name, value, is_secret",
    [
        *((name, "x", True) for name in ("PGPASSWORD", "APIKEY", "HF_TOKENS", "X_PASSWD", "X_CREDENTIALS", "X_PASS")),
        *((name, "123", True) for name in ("HF_TOKEN_2", "HF_TOKEN2", "X_SECRETS", "api_keys_file_secret")),
        ("MOONCAKE_CONNECTOR_PAGE_TOKENS", "64", False),
        ("MOONCAKE_CONNECTOR_MIN_HIT_TOKENS", "null", False),
        ("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "7", False),
        ("X_TOKENS", "8k", False),
        ("X_TOKENS", "a8k", True),
        ("VLLM_ENABLE_PREGRAD_PASSES", "x", False),
        *((name, "x", False) for name in ("PATH", "TOKENIZER", "SECRET_FILE", "KEYBOARD", "MONKEY", "COMPASS")),
        ("HF_TOKEN", "", False),
    ],
)
def test_a_variable_is_a_secret_by_its_name(name, value, is_secret):
    made = contained(Command("x", "decode", ("x",), {name: value}, "", ()), "$({})".format, {}, Secrets())
    assert (name in made.secrets) is is_secret and made.env == ({} if is_secret else {name: value})


@pytest.mark.parametrize(
    "words, printed",
    [
        ("--api-key abc -dp 2", "--api-key $(API_KEY) -dp 2"),
        ("--api-key a b -O3 c", "--api-key $(API_KEY) $(API_KEY_DECODE) -O3 c"),
        ("--api-key -1", "--api-key $(API_KEY)"),
        ("--tokenizer t --max-num-batched-tokens 8192", "--tokenizer t --max-num-batched-tokens 8192"),
        ("--max-num-batched-tokens=16k", "--max-num-batched-tokens=16k"),
        ("--api_key=a", "--api_key=$(API_KEY)"),
    ],
)
def test_the_values_of_a_flag_are_secrets_by_its_name(words, printed):
    command = Command("x", "decode", ("x", *words.split()), {}, "", ())
    assert " ".join(contained(command, "$({})".format, {}, Secrets()).arguments[1:]) == printed
