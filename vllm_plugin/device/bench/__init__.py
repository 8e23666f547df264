"""What `mooncake-connector bench device` measures on a GPU; it needs torch and Triton, and no engine."""
