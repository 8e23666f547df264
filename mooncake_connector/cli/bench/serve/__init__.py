"""`mooncake-connector bench serve`: what a KV connector does for a server whose own cache is too small."""
