"""Plain data every other part speaks: requests, sampling parameters, step plans, layouts."""
