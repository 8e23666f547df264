"""`mooncake-connector size`: the figures of docs/sizing.md from configurations, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mooncake_connector.cli.main import app
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.shape import ITEMSIZES, read_shape
from mooncake_connector.sizes import human_nbytes

DOCS = Path(__file__).parents[2] / "docs" / "sizing.md"
QWEN = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
        "sliding_window": 4096, "use_sliding_window": False, "torch_dtype": "bfloat16",
    },
    "DeepSeek-V3, R1": {
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
    },
    "Qwen3-30B-A3B": {"text_config": {**QWEN, "layer_types": ["full_attention"] * 48}, "dtype": "torch.bfloat16"},
    "Llama-3.1-8B, Mistral-7B-v0.3": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "sliding_window": None, "torch_dtype": "float16",
    },
}  # fmt: skip


def written(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_figures_are_those_of_the_docs(tmp_path: Path, name: str) -> None:
    (row,) = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |")]
    token, page, _, tokens = [cell.strip() for cell in row.strip("|").split("|")][4:]
    arguments = ["size", str(written(tmp_path, CONFIGS[name])), "--capacity", "16GiB", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)
    as_in_docs = [float(re.match("[0-9.]+", text)[0]) for text in (token, page)]
    assert [found["token_nbytes"] / 1024, found["page_nbytes"] / (1 << 20)] == pytest.approx(as_in_docs, abs=0.05)
    assert found["pool_tokens"] == int(tokens.replace(",", ""))


def test_ranks_divide_heads_and_never_one_of_them(tmp_path: Path) -> None:
    folder = written(tmp_path, CONFIGS["Llama-3.1-8B, Mistral-7B-v0.3"])
    parts = [
        json.loads(CliRunner().invoke(app, ["size", str(folder), "--tp", str(tp), "--json"]).stdout)["rank_page_nbytes"]
        for tp in (1, 2, 8, 16)
    ]
    assert parts == [8 << 20, 4 << 20, 1 << 20, 1 << 20]


def test_it_says_what_the_pool_holds(tmp_path: Path) -> None:
    folder = written(tmp_path, CONFIGS["Llama-3.1-8B, Mistral-7B-v0.3"])
    environ = {"MOONCAKE_CONNECTOR_CAPACITY": "32GiB"}
    done = CliRunner().invoke(app, ["size", str(folder), "--kv-dtype", "fp8", "--tp", "2"], env=environ)
    assert re.search("the pool holds +524,288 tokens in 32.0 GiB, the configured capacity", done.stdout)
    assert re.search("each of 2 ranks +2.0 MiB", done.stdout)


def test_other_names_of_the_same_fields(tmp_path: Path) -> None:
    shape = read_shape(written(tmp_path, {"n_layer": 12, "n_head": 12, "n_embd": 768, "multi_query": True}))
    assert (shape.num_layers, shape.num_kv_heads, shape.k_dim, shape.v_dim) == (12, 1, 64, 64)
    assert human_nbytes(shape.page_format(1).nbytes) == "3.0 KiB"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**QWEN, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention: only models with full"),
        ({**QWEN, "sliding_window": 4096}, "sliding_window"),
        ({**QWEN, "mamba_d_state": 128}, "mamba_d_state"),
        ({**QWEN, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**QWEN, "head_dim": "128"}, "head_dim is '128'"),
        ({**QWEN, "dtype": "int4"}, "dtype 'int4' is not known"),
        ({**QWEN, "attention_chunk_size": 8192}, "attention_chunk_size"),
        ({**QWEN, "attn_config": {"kv_n_heads": 8}}, "attn_config is not understood"),
        ({"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 4}, "it has no head_dim"),
        ({"num_hidden_layers": 3}, "it has no num_attention_heads or n_head"),
        ([], "holds no object"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(tmp_path: Path, config: object, words: str) -> None:
    done = CliRunner().invoke(app, ["size", str(written(tmp_path, config))])
    assert done.exit_code == 1
    assert words in done.stderr and ("dtype" in words or str(tmp_path / "config.json") in done.stderr)


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"n_head_kv": 8}, 8),
        ({"num_attention_groups": 4}, 4),
        ({}, 32),
    ],
)
def test_kv_heads_are_found_as_engines_find_them(tmp_path: Path, config: dict[str, Any], kv_heads: int) -> None:
    config |= {"num_hidden_layers": 2, "num_attention_heads": 32, "head_dim": 64}
    assert read_shape(written(tmp_path, config)).num_kv_heads == kv_heads


def test_float32_is_served_in_16_bits_and_an_unknown_dtype_needs_a_name(tmp_path: Path) -> None:
    assert read_shape(written(tmp_path, {**QWEN, "torch_dtype": "float32"})).dtype == "bfloat16"
    folder = written(tmp_path, {**QWEN, "torch_dtype": "float8_e4m3fn"})
    done = CliRunner().invoke(app, ["size", str(folder), "--kv-dtype", "fp8", "--json"])
    assert json.loads(done.stdout)["token_nbytes"] == 48 * 4 * 256


def test_a_pool_is_only_foretold_where_an_engine_would_make_it(tmp_path: Path) -> None:
    folder = written(tmp_path, QWEN)
    for pool, told in ((tmp_path / "a" / "b" / "c", 0), (tmp_path, 1)):  # the second holds the model
        done = CliRunner().invoke(app, ["size", str(folder)], env={"MOONCAKE_CONNECTOR_POOL": str(pool)})
        assert done.exit_code == told and ("is not a pool" in done.stderr) == bool(told)
        assert ("in 0 B" in done.stdout) is False


WRONG = [["--kv-dtype", "int4"], ["--capacity", "much"], ["--capacity", "0"], ["--capacity", "64"], ["--tp", "none"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage_is_told(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["size", str(written(tmp_path, QWEN)), *arguments])
    assert done.exit_code == 2 and arguments[0] in done.stderr


def test_a_device_that_never_ends_is_no_configuration() -> None:
    done = CliRunner().invoke(app, ["size", "/dev/zero"])
    assert (done.exit_code, "/dev/zero cannot be read" in done.stderr) == (1, True)


def test_a_name_that_is_no_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["size", str(tmp_path / "nothing")])
    assert (done.exit_code, "give the folder of its checkpoint" in done.stderr) == (1, True)


@given(
    st.dictionaries(
        st.sampled_from([*QWEN, "kv_lora_rank", "torch_dtype", "layer_types", "v_head_dim", "text_config"]),
        st.none() | st.integers() | st.sampled_from(["bfloat16", "x"]) | st.lists(st.none()),
    )
)
def test_any_configuration_has_a_shape_or_a_reason(tmp_path_factory: Any, config: dict[str, Any]) -> None:
    folder = written(tmp_path_factory.mktemp("model"), config)
    try:
        assert all(read_shape(folder).page_format(64, dtype).nbytes > 0 for dtype in (None, *ITEMSIZES))
    except ModelIdentityError as error:
        assert str(folder) in str(error)
