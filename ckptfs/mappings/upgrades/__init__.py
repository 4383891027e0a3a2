"""Steps between Cerebras releases: configs, tensors and the rest of the state."""
