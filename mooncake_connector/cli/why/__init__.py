"""`mooncake-connector why`: which pages of a prompt the pool has, and why not the others."""
