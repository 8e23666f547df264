"""Prefill and decode apart in vLLM."""
