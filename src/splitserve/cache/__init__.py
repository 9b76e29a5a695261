"""Who holds which page: free list, page-table rows, prefix cache. Pure bookkeeping: no torch, no sockets."""
