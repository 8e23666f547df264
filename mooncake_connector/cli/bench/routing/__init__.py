"""A simulation of instances behind the built-in router, whose own policies run in it."""
