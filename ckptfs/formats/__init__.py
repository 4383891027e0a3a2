"""File formats, each in one place for reading and writing: bytes → `Source`, tensors → a file of extents."""
