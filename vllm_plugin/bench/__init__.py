"""Scripts of `mooncake-connector bench store` that run in a vLLM environment, by path, in processes of their own."""
