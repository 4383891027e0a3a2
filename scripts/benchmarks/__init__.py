"""What `scripts/bench.py` is made of: checkpoints to measure with, mounts, and the measures P1 to P8."""
