"""A worker's front end: HTTP in, token ids to the scheduler, text back. It never sees the model.

Follow one request through it in this order: `app` builds the routes, `native` and `openai` parse a body with `schemas`,
`validation` resolves and checks it, `fanout` makes single-sample requests of it, `requests` lets it in, `generation`
runs it over `scheduler_client` and `detokenizer`, `stream` sends it as it comes.
"""
