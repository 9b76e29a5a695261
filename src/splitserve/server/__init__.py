"""A worker's front end: HTTP to tokens, tokens to the scheduler, tokens to text. It never sees the model.

Follow one request: `app.py` builds the routes, `native.py` and `openai.py` read the prompts of a body,
`generate_route.py` serves it. `front_end.py` admits it, `generation.py` runs it over `scheduler_group.py` and
`scheduler_client.py` and grows the answers.
"""
