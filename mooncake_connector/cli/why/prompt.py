"""The tokens of a prompt, as the engine would count them: from a file, a running server, or the model's tokenizer."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import printable

_TIMEOUT_S = 30.0
_NEEDED = (
    "install the tokenizer that the engine has (`pip install transformers`, or run this in the engine's environment), "
    "or ask a running server with --url, or give --tokens FILE"
)


class PromptError(MooncakeConnectorError):
    """The tokens of a prompt cannot be told."""


def read_tokens(file: Path) -> list[int]:
    """Token ids from a file ("-": stdin): a JSON list, an object with one (`tokens`, `prompt_token_ids`), or numbers.

    Raises PromptError.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PromptError(f"--tokens {file} cannot be read: {reason}") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = [int(word) if word.isdecimal() else word for word in re.split(r"[\s,]+", text.strip())]
    if isinstance(found, dict):
        found = found.get("tokens", found.get("prompt_token_ids"))
    return _checked(found, f"--tokens {file}")


def _checked(found: Any, where: str) -> list[int]:
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token < 1 << 64 for token in found):
        raise PromptError(f"{where} holds no list of token ids: expected numbers, as in [1, 4093, 2]")
    return found


def ask_server(url: str, prompt: str, *, chat: bool, model: str | None) -> list[int]:
    """What a server's own /tokenize says. Raises PromptError."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if model is not None:
        asked["model"] = model
    answer = _json(f"{url}/tokenize", asked)
    return _checked(answer.get("tokens"), f"the answer of {url}/tokenize")


def served_model(url: str) -> tuple[str | None, str | None]:
    """Name and path of the model that a server has; None where it does not say. Raises PromptError."""
    models = _json(f"{url}/v1/models").get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    name, path = first.get("id"), first.get("root")
    return (name if isinstance(name, str) else None), (path if isinstance(path, str) else None)


def _json(url: str, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise PromptError(f"--url {url!r}: expected http://HOST:PORT of a running server")
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        detail = printable(error.read(500).decode(errors="replace"), 200)
        raise PromptError(f"{url} answered {error.code}: {detail}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PromptError(f"{url} gives no answer: {getattr(error, 'reason', error)}") from None
    if not isinstance(answer, dict):
        raise PromptError(f"{url} answered with no JSON object: is it a server of vLLM or SGLang?")
    return answer


def tokenize(model: Path, prompt: str, *, chat: bool) -> list[int]:
    """With the tokenizer of a model's folder, special tokens as both engines add them. Raises PromptError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        if chat:
            raise PromptError(f"transformers is not installed here, which knows chat templates: {_NEEDED}") from None
        return _plainly(model, prompt)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(tokenizer(prompt)["input_ids"])
    except Exception as error:
        raise PromptError(f"{model} has no tokenizer that can be used ({error}): {_NEEDED}") from None


def _plainly(model: Path, prompt: str) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PromptError(f"neither transformers nor tokenizers is installed here: {_NEEDED}") from None
    try:
        return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt).ids)
    except Exception as error:
        raise PromptError(f"{model / 'tokenizer.json'} cannot be used ({error}): {_NEEDED}") from None
