"""Single-device model code: it knows nothing of processes, sharding or training."""
