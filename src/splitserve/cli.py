"""Command line. Written in layer 7."""
