"""One worker: assemble scheduler, engine, KV manager and front end, start their processes, change the role.

`worker.py` starts the processes of a worker, `scheduler_process.py` builds a scheduler from its parts, `role_switch.py`
replaces the role of a running worker.
"""
