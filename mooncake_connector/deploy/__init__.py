"""One file, one command: prefill and decode instances of an engine with a router before them.

`schema` says what the file holds, `file` reads it, `commands` says what is run for it, `checks` what must hold before,
`supervisor` runs it, each process below a `keeper` that leaves nothing behind, and `proxy` is the built-in router, with
`fleet` for the instances behind it and `asgi` for the client before it. `render` writes the same commands for Compose
and Kubernetes.
"""
