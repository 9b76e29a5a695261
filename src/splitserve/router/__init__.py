"""The router: pairs a prefill worker with a decode worker for every request, and forwards bytes between them."""
