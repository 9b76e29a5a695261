"""The router: choose a pair of workers for each request, forward the bytes between them, recover from failures.

Follow one request: `app.py` and `generate_app.py` accept it, `admission.py` bounds it, `policies.py` and `pairing.py`
choose a pair, `exchange.py` forwards, `journal.py` and `tries.py` continue on another pair when a worker is lost.
`local_prefill.py` counts what a decode worker would compute if it served a prompt alone. `metrics.py` has the figures.
"""
