"""Measurements of this machine: time by span, energy, and figures kept on disk."""
