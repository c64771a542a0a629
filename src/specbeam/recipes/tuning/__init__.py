"""Measured costs: the time on this machine of a pass of a model, and of a turn outside the models."""
