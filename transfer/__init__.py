"""KV cache from one engine process into another's memory: layouts, copy plans, the PD protocol, and transports.

Not responsible for engines (the adapters are) nor for the pool of pages (`store_client`).
"""
