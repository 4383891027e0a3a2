"""The optional C extension, its binding, scratch buffers, prefetch hints. Python twins give the same bytes."""
