"""One Cerebras release as another, up and down: keys, configs, optimizer and the rest of the state."""
