"""KV transfer between a prefill worker and a decode worker.

`manager.py` ticks one rank (`prefill_manager.py`, `decode_manager.py`). A room is a `sender.py` or a `receiver.py`,
with its table in `state.py`; `room.py` combines the ends of all ranks. `wire.py` has their messages, `reshard.py` plans
copies between two layouts, `pairing.py` compares the layouts first.
`outgoing.py` hands a sender's pages to the transport, `control.py` has the thread that ticks the manager.
`transports/` moves the bytes: one file or a few for each backend.
"""
