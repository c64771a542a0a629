"""Measured costs: what a pass of a model and a turn beside it take on this machine."""
