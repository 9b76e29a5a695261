"""The HTTP edge that router and workers share: schemas, validation, limits, keys, TLS, and the shape of errors.

Follow a body: `intake.py` reads it, `validation.py` parses it, `schemas.py` types it, `validation.py` resolves and
checks it, `samples.py` splits it into single samples. `openapi.py` declares the routes.
`tokenizer.py` turns a conversation into a prompt. `responses.py` makes the bodies of errors and the events of a stream.
"""
