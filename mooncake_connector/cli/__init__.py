"""The command line `mooncake-connector`: everything a person wants to know about a pool or do to it.

The only part of the ground's package that looks down from the roof: it may import the floors below the adapters.
"""
