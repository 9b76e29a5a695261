"""The engine's own kernels for CPUs, in C: packed linears, paged attention of decode steps, and the steps between.

1. `library` finds the build for this CPU's instructions and defines the C structures.
2. `weights` packs a linear layer once, `stack` builds decoder layers and a decoder of them; `layers` replaces the
   model's own layers by them.
3. `engine/attention/kernels.py` computes attention with them.

They compute bfloat16 on CPUs only; torch computes everything else. Tests compare each part with torch's result.
"""
