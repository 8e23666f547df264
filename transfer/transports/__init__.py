"""Transports: how bytes get from this process's memory into memory that a peer granted."""
