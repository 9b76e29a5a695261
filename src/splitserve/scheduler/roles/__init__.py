"""What a worker does with requests: colocated, prefill, decode. Changing role means replacing one object."""
