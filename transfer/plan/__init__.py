"""Which bytes go where: layouts of ranks, and lists of copies between them. Pure."""
