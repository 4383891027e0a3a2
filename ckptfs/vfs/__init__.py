"""What a mount looks like: directories, files, names, and which views a checkpoint has. No errno, no FUSE."""
