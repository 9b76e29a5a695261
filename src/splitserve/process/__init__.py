"""The life of one operating system process: start, readiness, authentication, logs, signals, temporary folders, end.

`child.py` starts a process and waits until it is ready. `process_end.py` ends it with the process that started it.
`owned_folder.py` removes folders of processes that are gone. `threads.py` has threads that wait for descriptors or
run an asyncio loop. Knows nothing of what the processes do.
"""
