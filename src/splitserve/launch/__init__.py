"""Composition: builds the parts, hands them to each other, starts processes and ends them without leftovers."""
