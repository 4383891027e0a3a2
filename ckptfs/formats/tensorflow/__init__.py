"""Checkpoints of TensorFlow (version 2, "bundles"): an index, which is a sorted table, and data files."""
