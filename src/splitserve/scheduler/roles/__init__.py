"""What a worker does with requests: colocated, prefill, decode. `role_switch.py` replaces one by another."""
