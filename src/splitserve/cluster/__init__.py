"""Many machines: a cluster as a file describes it, kept as it says.

`config.py` is the file, `reconciler.py` decides what to start and what to end, a placer does it (`local_placer.py`,
`ray_placer.py`), `supervisor.py` goes round and round. `kubernetes.py` writes the same file as manifests instead.
"""
