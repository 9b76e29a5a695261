"""Faults on purpose: workers that die or stop at a chosen stage, and the run that shows that no client loses by it."""
