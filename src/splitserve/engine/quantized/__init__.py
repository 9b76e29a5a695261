"""Checkpoints that are already quantized: which schemes are supported, how their tensors are read, what is loaded."""
