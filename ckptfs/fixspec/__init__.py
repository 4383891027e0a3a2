"""Repair of checkpoints that releases 1.7 to 1.9 wrote: their tree spec, weights stored once, steps of schedulers."""
