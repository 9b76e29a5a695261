"""The few loops that Python is too slow for, in C. Each has a slower equivalent for machines without a C compiler.

The libraries are built at installation. They are not Python modules: plain functions for ctypes. `tables.py` and
`moves.py` are the Python side of `copies.c` and `scatter.c`. The modules that use `stream.c` and the kernels have
theirs.
"""
