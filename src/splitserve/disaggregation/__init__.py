"""Prefill and decode apart: the life of a request on either side, and the hand-over of its KV cache."""
