"""Prefill and decode in different SGLang instances: KV travels by `transfer`, between SGLang's own queues."""
