"""Checkpoints that are already quantized: supported schemes, reading of their tensors, loading."""
