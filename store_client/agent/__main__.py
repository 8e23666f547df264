"""`python -m store_client.agent`: what an engine starts."""

from store_client.agent.process import leave, main

if __name__ == "__main__":
    leave(main())
