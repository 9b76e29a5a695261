"""When to run what. Knows the engine, the transfer layer and the clock only as Protocols."""
