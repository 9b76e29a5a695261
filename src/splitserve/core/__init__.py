"""Plain data that every room uses: requests, sampling, step plans, layouts, config, messages, errors, clock.

Needs only the standard library and msgspec. `request.py` is one request, `batch.py` a step's plan and result,
`layout.py` a KV pool as data, `messages.py` what the processes of a worker send each other, `config.py` a worker's
options, described by `options.py`.
"""
