"""Measured costs on this machine: passes of models, and turns outside the models."""
