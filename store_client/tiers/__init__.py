"""Tiers: what lies behind the pool of a host, wider or colder. The agent alone uses them."""
