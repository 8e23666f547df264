"""Names of dtypes in namespaces, from vLLM's words for them."""

from __future__ import annotations

from vllm.platforms import current_platform


def eight_bit_name(configured: str) -> str:
    """Of `--kv-cache-dtype`, where that is eight-bit floating point; any other word is its own."""
    e4m3 = "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"  # the same bits, of half the value
    return {"fp8": e4m3, "fp8_e4m3": e4m3}.get(configured, configured)
