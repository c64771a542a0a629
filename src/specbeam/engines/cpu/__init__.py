"""The engine for CPUs: compiled layers of the families in families.py, which read the weights in panels."""
