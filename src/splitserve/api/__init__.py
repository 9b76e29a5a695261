"""The HTTP edge that router and workers share: schemas, validation, limits, keys, TLS, and the shape of errors.

Follow a body: `intake.py` reads it within `limits.py`, `json_body.py` parses it, `schemas.py` types it,
`validation.py` resolves and checks it, `fanout.py` splits it into single samples. `openapi.py` declares the routes.
`tokenizer.py` and `chat_template.py` turn a conversation into a prompt.
`error_shape.py` and `error_response.py` make the bodies of errors, `stream.py` the events of a stream.
"""
