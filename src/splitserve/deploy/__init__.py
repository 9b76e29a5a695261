"""Many workers: `up`, the cluster file, Ray, Kubernetes.

`config.py` is the cluster file, `reconciler.py` compares desired with actual processes, a placer (`placer.py`,
`ray_placer.py`) starts and ends them, `supervisor.py` repeats this. `kubernetes.py` writes the same file as
manifests.
"""
