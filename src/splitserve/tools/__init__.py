"""Commands for people: chat, demo, doctor, verify, benchmarks, fault injection.

`verify.py` proves equal output on the user's machine, `bench/` measures, `chaos/` injects faults under load.
"""
