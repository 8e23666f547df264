"""`mooncake-connector why`: the pages of one prompt, and why the pool has not all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_connector.cli.columns import clean, folded
from mooncake_connector.cli.live import is_here
from mooncake_connector.cli.output import Json, PoolFolder, print_json, typed_path, width
from mooncake_connector.cli.pool import find_namespace, opened
from mooncake_connector.cli.store import Which
from mooncake_connector.cli.why import names, prompt, runs
from mooncake_connector.cli.why import request as request_
from mooncake_connector.cli.why.look import Explanation, Other, Root, explain
from mooncake_connector.cli.why.names import Asked, Family
from mooncake_connector.cli.why.prompt import PromptError
from mooncake_connector.cli.why.server import Server, look_up
from mooncake_connector.config.sources import config_of, load_settings, page_tokens_set
from mooncake_connector.config.together import Setting
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.checkpoint import checkpoint_path
from mooncake_connector.kv.identity.fingerprint import default_cache_dir
from mooncake_connector.kv.identity.model import LORA_FILES, files_digest
from mooncake_connector.kv.identity.shape import ITEMSIZES
from store_client import Store

_OTHERS_SHOWN = 5
_REQUESTS_SHOWN = 5


def why(
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt as it was sent; - for stdin.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            parser=typed_path,
            help="The model's folder, or its name on the hub where it is cached.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", metavar="FILE", parser=typed_path, help="Token ids instead of a prompt; - for stdin."
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option("--request", metavar="ID", help="What engines with log_requests found; a part of it will do."),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="A running engine, which tells model, dtype and tokens.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is the one message of a chat.")] = False,
    salt: Annotated[str | None, typer.Option("--salt", help="The request's cache_salt.")] = None,
    extra_key: Annotated[str | None, typer.Option("--extra-key", help="The request's extra_key (SGLang).")] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", metavar="DIR", parser=typed_path, help="The LoRA adapter (vLLM).")
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype", metavar="|".join(ITEMSIZES), help="Of the KV cache. Default: the engine's, else the model's."
        ),
    ] = None,
    namespace: Which = None,
    pool: PoolFolder = None,
    as_json: Json = False,
) -> None:
    """Which pages of a prompt the pool has, and why not the others.

    Nothing is computed, loaded or counted, and no engine has to run: pages are found by the prompt's tokens and the
    model's files. --request says what an engine found when it answered. The pool is that of this user on this host.

    \b
    Examples:
      mooncake-connector why --model /models/Llama-3.1-8B-Instruct "You are a helpful assistant. ..."
      mooncake-connector why --url http://localhost:8000 --chat "What is a KV cache?"
      mooncake-connector why --url http://localhost:8000 - < prompt.txt
      mooncake-connector why --model /models/Qwen3-32B --tokens ids.json --salt tenant-7
      mooncake-connector why --request cmpl-4f1d
    """
    if sum(given is not None for given in (text, tokens, request)) != 1:
        raise typer.BadParameter("give one of a prompt, --tokens FILE and --request ID")
    if request is not None:
        if not request:
            raise typer.BadParameter("it is empty: write the id of a request, or a part of it", param_hint="--request")
        _why_request(request, pool, as_json)
        return
    if kv_dtype is not None and kv_dtype not in ITEMSIZES:
        raise typer.BadParameter(f"{kv_dtype!r} is none of {', '.join(ITEMSIZES)}", param_hint="--kv-dtype")
    if model is None and url is None and (namespace is None or tokens is None):
        raise typer.BadParameter("name the model's folder with --model DIR, or a running server with --url")
    settings = load_settings()
    config = config_of(settings)
    server = None if url is None else look_up(url)
    folder = _folder(model, server, needed=namespace is None)
    if tokens is not None:
        ids = prompt.read_tokens(tokens)
    else:
        ids = _ids(prompt.read_prompt(text or ""), folder, server, chat)
    root = Root(salt, extra_key, None if adapter is None else _adapter(adapter))
    with opened(pool) as store:
        known = names.families(store.namespaces())
        asked = Asked({}) if folder is None else names.asked_for(folder, config, _told(kv_dtype, server, settings))
        if namespace is not None:
            chosen: Family | None = _named(store, known, namespace)
        else:
            chosen = names.choose(asked, known) or (None if folder is None else names.unmet(asked.fields, folder))
        found = explain(
            store, ids, asked.fields, chosen, known, page_tokens=int(config.page_tokens), root=root,
            min_hit_tokens=config.min_hit_tokens,
        )  # fmt: skip
    if as_json:
        print_json(_plain(found))
        return
    if server is not None and pool is None and not is_here(server.url):
        _print([f"{server.url} is on another host: these are the pages of this host's pool"])
    _print(_lines(found, asked, config.min_hit_tokens or found.page_tokens, bool(config.tiers)))


def _why_request(wanted: str, pool: Path | None, as_json: bool) -> None:
    with opened(pool) as store:
        found = request_.find(store, wanted)
    if as_json:
        print_json(request_.plain(found))
        return
    for number, record in enumerate(found[-_REQUESTS_SHOWN:]):
        if number:
            typer.echo()
        _print(request_.lines(record))
    if len(found) > _REQUESTS_SHOWN:
        left_out = len(found) - _REQUESTS_SHOWN
        typer.echo(f"\n{left_out:,} earlier ones have {wanted!r} in their id too: write more of it, or take --json")


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo("\n".join(folded(line, width() or sys.maxsize, more="  ")))


def _folder(model: Path | None, server: Server | None, *, needed: bool) -> Path | None:
    """Where the model's files are; a name on a hub stands for what is in its cache here."""
    source = str(model) if model is not None else None if server is None else server.source
    try:
        if source is None:
            raise ModelIdentityError("it does not say which")
        path = checkpoint_path(source, None)
        path = path.parent if path.name == "config.json" else path
    except ModelIdentityError:
        if model is not None:
            raise PromptError(
                f"--model {source}: no such folder, and no model of this name is in the hub's cache here; "
                "name the folder with the model's config.json and weights"
            ) from None
        if not needed:
            return None
        assert server is not None
        raise PromptError(
            f"the files of the model that {server.url} serves ({source or 'it does not say which'}) are not here: "
            "name their folder with --model DIR, or one of the pool's namespaces (`store ls`) with --namespace ID"
        ) from None
    if path.is_dir() and not any((path / name).is_file() for name in ("config.json", "params.json")):
        raise PromptError(f"{path} is no model's folder: it has no config.json; name another one with --model DIR")
    return path


def _ids(text: str, model: Path | None, server: Server | None, chat: bool) -> list[int]:
    if server is not None:
        return server.tokens(text, chat=chat)
    assert model is not None
    return prompt.tokenize(model, text, chat=chat)


def _told(kv_dtype: str | None, server: Server | None, settings: list[Setting]) -> dict[str, Any]:
    """The fields of the namespace that need not be assumed: a person's word goes before a server's."""
    page_tokens = page_tokens_set(settings)
    told: dict[str, Any] = {} if page_tokens is None else {"page_tokens": page_tokens}
    if server is not None:
        told |= server.fields
    if kv_dtype is not None:
        told["kv_dtype"] = "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype
    return told


def _adapter(folder: Path) -> str:
    return files_digest(folder, LORA_FILES, cache_dir=default_cache_dir())


def _named(store: Store, known: list[Family], beginning: str) -> Family:
    digest = find_namespace(store, beginning)
    return next(family for family in known if any(part.namespace.digest == digest for part in family.parts))


def _lines(found: Explanation, asked: Asked, min_hit_tokens: int, tiered: bool) -> list[str]:
    pages = found.tokens // found.page_tokens
    lines = [f"{found.tokens:,} tokens, {_count(pages)} of {found.page_tokens}{_where(found.family)}"]
    if not pages:
        lines.append(f"shorter than a page: {found.tokens} of {found.page_tokens} tokens")
    for title, each in found.groups if pages else ():
        lines.append((f"{title}: " if title else "") + runs.line(each, forgets=found.forgets))
    for name, there in found.without.items():
        lines.append(f"{name}: without it {_count(there)} would hit; requests with another {name} share no pages")
    if found.family is not None:
        lines += _told_lines(found.family, found.told, asked)
    others = [other for other in found.others if pages or other.pages]
    lines += [_other_line(other, asked.fields) for other in others[:_OTHERS_SHOWN]]
    if len(others) > _OTHERS_SHOWN:
        lines.append(f"and {len(others) - _OTHERS_SHOWN} other namespaces: see `mooncake-connector store ls`")
    lines.append(_sum(found, min_hit_tokens))
    if found.reason is not None:
        lines.append(f"why not more: {found.reason.words.said}")
        lines.append(f"what to do: {found.reason.words.do}")
    if tiered:
        lines.append("tiers were not asked: they may have more of it (`mooncake-connector agent --status`)")
    return lines


def _where(family: Family | None) -> str:
    if family is None:
        return "; the pool has no namespace for this model, as it is asked for"
    name = family.namespace
    had = f"{family.pages:,} pages in all" if family.pages else "nothing of it is stored"
    return f", namespace {family.id} ({clean(name.model_name)}, {name.kv_dtype}, {had})"


def _sum(found: Explanation, min_hit_tokens: int) -> str:
    if 0 < found.hit_tokens < min_hit_tokens:
        return f"below min_hit_tokens: {found.hit_tokens:,} tokens hit, {min_hit_tokens:,} are wanted; all are computed"
    return f"a request would find {found.hit_tokens:,} of its {found.tokens:,} tokens in the pool"


def _told_lines(family: Family, fields: list[str], asked: Asked) -> Iterator[str]:
    """What its engines were started with, as far as that is not what was asked for."""
    has = family.namespace.to_dict()
    if own := [f"{name} {_short(has[name])}" for name in fields if name not in asked.assumed]:
        yield f"its engines were started with {', '.join(own)}: others do not see these pages"
    if chosen := [f"{name} is {has[name]}, not {asked.fields[name]}" for name in fields if name in asked.assumed]:
        yield f"{', '.join(chosen)}: the pool has no other pages of this model"


def _other_line(other: Other, asked: Mapping[str, Any]) -> str:
    has = other.family.namespace.to_dict()
    differing = [f"{name} ({_short(asked[name])} here, {_short(has[name])} there)" for name in other.fields]
    verb = "differs" if len(differing) == 1 else "differ"
    had = f"{_count(other.pages)} of this prompt" if other.pages else "none of this prompt"
    return (
        f"other namespace: {', '.join(differing)} {verb} from {other.family.id}, which has {other.family.pages:,} "
        f"pages, {had}"
    )


def _short(value: object) -> str:
    text = clean(str(value)) or "nothing"
    return text if len(text) <= 60 else f"{text[:12]}..."


def _count(pages: int) -> str:
    return f"{pages:,} page{'' if pages == 1 else 's'}"


def _plain(found: Explanation) -> dict[str, Any]:
    family = found.family
    return {
        "tokens": found.tokens,
        "page_tokens": found.page_tokens,
        "namespace": None if family is None else family.namespace.digest.hex(),
        "namespace_pages": 0 if family is None else family.pages,
        "hit_tokens": found.hit_tokens,
        "reason": None if found.reason is None else found.reason.value,
        "groups": [{"title": title, "runs": [run.plain() for run in each]} for title, each in found.groups],
        "engine_settings": found.told,
        "without": dict(found.without),
        "other_namespaces": [
            {
                "namespace": other.family.namespace.digest.hex(), "differs_in": other.fields,
                "pages": other.family.pages, "hit_pages": other.pages,
            }
            for other in found.others
        ],
    }  # fmt: skip
