"""The agent's HTTP server: what it listens at, whom it answers, and what the paths do."""
