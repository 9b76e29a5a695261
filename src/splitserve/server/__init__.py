"""A worker's front end: HTTP to tokens, tokens to the scheduler, tokens to text. It never sees the model.

Follow one request: `app.py` builds the routes, `native.py` and `openai.py` handle them, `requests.py` admits the
request, `generation.py` runs it over `scheduler_client.py` and `detokenizer.py`, `answer.py` is the growing answer.
"""
