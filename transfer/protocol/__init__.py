"""The protocol of a transfer between a prefill and a decode rank, sans-I/O."""
