"""SGLang's host pools and storage calls without an engine, for `mooncake-connector bench hicache`."""
