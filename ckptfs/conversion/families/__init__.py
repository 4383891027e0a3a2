"""Model families, one table each."""
