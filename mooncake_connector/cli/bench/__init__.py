"""Benchmarks behind `mooncake-connector bench`; each module holds one part of a run."""
