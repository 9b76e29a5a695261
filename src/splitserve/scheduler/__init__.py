"""When to run what: queues, admission, retraction, loops and roles of one scheduler.

A loop (`loops.py`) owns when, a role (`roles/`) owns what. A role has the queues of requests that wait for KV transfer,
`running.py` has those that compute. Engine, KV transfer and clock are known only as Protocols.

`parts.py` builds what stays when the role changes, `assembly.py` the scheduler and its loop.
`ports.py` has messages of the front end, tokens, and one final message per request. `admission.py` keeps a request
waiting while the pool is full, `retraction.py` takes pages from running requests.
"""
