"""The model: load it, run a step, attend over the paged KV pool, sample.

`build.py` assembles an engine, `runner.py` computes a step, `attention/` has the attention backends, `kernels/` the C
kernels for CPUs, `parallel/` one model over several ranks. The scheduler uses it only through the Protocol in `core`.
"""
