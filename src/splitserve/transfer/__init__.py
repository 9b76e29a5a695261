"""KV transfer between a prefill worker and a decode worker.

`manager.py` owns the state machines of both sides (`prefill_side.py`, `decode_side.py`, tables in `state.py`),
`wire.py` has their messages, `reshard.py` plans copies between two layouts, `pairing.py` compares the layouts first,
`lease.py` decides when a page may be used again. `transports/` moves the bytes: one file or a few for each backend.
"""
