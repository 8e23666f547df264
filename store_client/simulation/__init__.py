"""What a pool of another size, or with another eviction policy, would have done with traffic that was seen.

`traces` reads traffic, `model` is a pool without pages that runs the store's own policies, `sweep` puts sizes beside
each other.
"""
