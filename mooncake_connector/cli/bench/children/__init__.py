"""Scripts that other interpreters run: they import nothing of this package, whose name need not be known there."""
