"""What routers ask: which instance has how much of a prompt, on which medium. Knows nothing of HTTP."""
