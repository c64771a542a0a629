"""Figures that a test comes by, for who runs it by `pytest -s`."""

import sys


def show(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{text}\n")
