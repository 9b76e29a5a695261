"""The router: choose a pair of workers for each request, forward the bytes between them, recover from failures.

Follow one request: `app.py` receives it, `balancer.py` serves it and records the outcome. `admission.py` bounds it,
`registry.py` and `policies.py` choose a pair, `pairing.py` writes the body for both workers, `exchange.py` forwards,
`attempts.py` continues on another pair when a worker is lost. `metrics.py` has the figures.
"""
