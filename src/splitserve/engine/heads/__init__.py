"""Draft heads: proposers of draft tokens that read hidden states of the served model."""
