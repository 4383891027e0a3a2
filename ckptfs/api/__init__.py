"""The Python interface: open, view, load, save. Thin classes over what the rooms below return."""
