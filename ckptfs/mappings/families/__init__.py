"""Model families, one file each: constants, and a few short functions for true oddities."""
