"""The engine's own kernels for CPUs, in C: packed linears, paged attention of decode steps, what is between.

1. `library` finds the build for this CPU's instructions and knows the C structures.
2. `weights` packs a linear layer once, `fused` makes a decoder layer of them, `stack` a decoder; `layers` puts them in
   the place of the model's own.
3. `engine/attention/native.py` attends with them.

bfloat16 on CPUs only; everything else is torch's. Tests hold each part to torch's result.
"""
