"""Doors: from what users write, in Python, at the command line or to transformers, to the records of the core and back."""
