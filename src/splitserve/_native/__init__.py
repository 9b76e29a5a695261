"""The few loops that Python is too slow for, in C. Each has a slower twin for machines where it was not built.

The libraries are built at installation where there is a C compiler. They are no Python modules: plain functions for
ctypes. `tables.py` and `moves.py` are the Python of `copies.c` and `scatter.c`; whoever uses `stream.c` and the kernels
has theirs.
"""
