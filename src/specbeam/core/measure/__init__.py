"""Measurements of this machine: time by span, and figures saved on disk."""
