"""Files of ``torch.save``, zip and legacy, for reading and writing. Nothing in a pickle is ever executed."""
