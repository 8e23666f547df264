"""What a server counts of its caches: prompt tokens by where their KV came from."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.cli.bench.serve.client import Server


@dataclass(frozen=True, slots=True)
class CacheTokens:
    """Prompt tokens by where their KV came from; differences of a server's counters."""

    computed: int = 0
    engine_cache: int = 0
    connector: int = 0

    def __sub__(self, other: CacheTokens) -> CacheTokens:
        return CacheTokens(
            self.computed - other.computed,
            self.engine_cache - other.engine_cache,
            self.connector - other.connector,
        )

    def __add__(self, other: CacheTokens) -> CacheTokens:
        return CacheTokens(
            self.computed + other.computed,
            self.engine_cache + other.engine_cache,
            self.connector + other.connector,
        )


_VLLM = {"local_compute": "computed", "local_cache_hit": "engine_cache", "external_kv_transfer": "connector"}


def cache_tokens(server: Server) -> CacheTokens | None:
    """What the server has counted since its start; None where it has no counters that are known here."""
    try:
        status, _, content = server.get("/metrics")
        return parse_cache_tokens(content.decode(errors="replace")) if status == 200 else None
    except Exception:  # nobody promises that what is there is Prometheus's format
        return None


def parse_cache_tokens(text: str) -> CacheTokens | None:
    """vLLM's counters of prompt tokens by source, over all of its engines."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:prompt_tokens_by_source_total":
                name = _VLLM.get(sample.labels.get("source", ""))
                if name is not None:
                    counts[name] = counts.get(name, 0.0) + sample.value
    return CacheTokens(**{name: int(value) for name, value in counts.items()}) if counts else None
