"""The tokens of a prompt, as the engine would count them: from a file, or from the model's tokenizer."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import printable
from mooncake_connector.pipes import opened

_MOST_CHARACTERS, _MOST_DIGITS = 64 << 20, 20
_INSTEAD = "ask a running server with --url, or give --tokens FILE"
_NEEDED = f"run this in the engine's environment, or install it with `pip install transformers`, or {_INSTEAD}"


class PromptError(MooncakeConnectorError):
    """The tokens of a prompt cannot be told."""


def read_tokens(file: Path) -> list[int]:
    """Token ids from a file ("-": stdin): a JSON list, an object with one (`tokens`, `prompt_token_ids`), or numbers.

    Raises PromptError.
    """
    try:
        with nullcontext(sys.stdin) if str(file) == "-" else opened(file, encoding="utf-8") as source:
            text = _read(source)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"--tokens {file} cannot be read: {reason}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        words = re.split(r"[\s,]+", text.strip())
        found = [int(word) if word.isdecimal() and len(word) <= _MOST_DIGITS else word for word in words]
    if isinstance(found, dict):
        found = found.get("tokens", found.get("prompt_token_ids"))
    return token_ids(found, f"--tokens {file}")


def read_prompt(text: str) -> str:
    """The prompt as it was typed, or all of stdin for "-". Raises PromptError."""
    if text != "-":
        return text
    try:
        return _read(sys.stdin)
    except (OSError, ValueError) as error:
        raise PromptError(f"the prompt on stdin cannot be read: {error}") from None


def _read(source: IO[str]) -> str:
    """All of a file, which may be a pipe, or a device that never ends. Raises OSError, ValueError."""
    try:
        text = source.read(_MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters: is this the right file?")
    return text


def token_ids(found: Any, where: str) -> list[int]:
    """`found`, where it is a list of token ids; `where` it was found. Raises PromptError for anything else."""
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token < 1 << 64 for token in found):
        raise PromptError(f"{where} holds no list of token ids: expected numbers, as in [1, 4093, 2]")
    return found


def tokenize(model: Path, prompt: str, *, chat: bool) -> list[int]:
    """With the tokenizer of a model's folder, special tokens as both engines add them. Raises PromptError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        if chat:
            raise PromptError(f"transformers, which knows chat templates, is not installed here: {_NEEDED}") from None
        return _plainly(model, prompt)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            if not tokenizer.chat_template:
                raise PromptError(f"the tokenizer in {model} has no chat template: leave --chat out, or {_INSTEAD}")
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(tokenizer(prompt)["input_ids"])
    except PromptError:
        raise
    except Exception as error:
        raise PromptError(f"{model} has no tokenizer that can be used ({_first_line(error)}): {_INSTEAD}") from None


def _plainly(model: Path, prompt: str) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PromptError(f"neither transformers nor tokenizers is installed here: {_NEEDED}") from None
    try:
        return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids)
    except Exception as error:
        raise PromptError(f"{model / 'tokenizer.json'} cannot be used ({_first_line(error)}): {_INSTEAD}") from None


def _first_line(error: Exception) -> str:
    return printable(next(iter(str(error).strip().splitlines()), type(error).__name__), 200)
