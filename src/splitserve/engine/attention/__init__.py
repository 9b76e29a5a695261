"""Attention over the paged KV pool: the contract and how models reach it (`base`), and the backends."""
