"""KV events: changes of a worker's prefix cache, published to routers and indexers that subscribe."""
