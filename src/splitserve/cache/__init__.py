"""Which request or prefix holds which page: free list, page-table rows, prefix cache, host tier.

Pure bookkeeping, without torch and sockets. `kv_cache.py` is the one account of a pool: free + cached + leased +
running = total. `prefix.py` finds cached prefixes, `host_memory.py` keeps evicted pages in host memory.
"""
