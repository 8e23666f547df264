"""Transports on libraries that clusters have deployed and tuned: each is loaded only where it is configured."""
