"""Weights that take in what a format cannot say: muP scales and LoRA adapters."""
