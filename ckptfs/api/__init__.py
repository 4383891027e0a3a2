"""The Python door: open, view, load, save. Thin classes over what the rooms below return."""
