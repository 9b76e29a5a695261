"""Attention over the paged KV pool: the contract (`base`), the way models reach it (`bridge`), and the backends."""
