"""What an operator watches, in Prometheus' form."""
