"""One model over several ranks: what each holds, and how they compute a step together (docs/parallelism.md)."""
