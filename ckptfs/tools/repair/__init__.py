"""Repair of checkpoints of releases 1.7 to 1.9, whose spec newer trainers refuse."""
