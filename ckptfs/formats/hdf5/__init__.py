"""HDF5 itself: superblock, object headers, chunks, filters, for reading and writing. Knows nothing of Cerebras."""
