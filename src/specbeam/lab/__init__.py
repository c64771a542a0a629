"""Measurement and training tools, which import public names only."""
