"""Cerebras checkpoints, formats 0.1 to 0.5, for reading and writing. Knows nothing of superblocks."""
