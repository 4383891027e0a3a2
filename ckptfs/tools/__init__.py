"""Work on whole checkpoints without a mount: export to disk, diff, check, repair of old releases."""
