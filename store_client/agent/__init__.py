"""The agent: one for each pool, between it and the tiers. Engines ask it over a Unix socket."""
