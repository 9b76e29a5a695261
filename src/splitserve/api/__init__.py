"""Code that router and workers share at their HTTP edge: limits of connections, bodies and memory."""
