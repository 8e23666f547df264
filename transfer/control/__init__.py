"""Control connections between instances: who is there, and where its ranks are."""
