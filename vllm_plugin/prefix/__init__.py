"""Prefix reuse in vLLM: lookups, loads from the pool, and saves."""
