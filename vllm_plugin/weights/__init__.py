"""Which weights an engine has in memory: a digest of them, when it is taken, and what it means for names of pages."""
