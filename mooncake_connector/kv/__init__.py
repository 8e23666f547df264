"""What KV cache is, engine and place apart: pages, their keys, and the namespaces in which they mean something."""
