"""KV events: what a worker's prefix cache holds, told to routers and indexers that subscribe."""
