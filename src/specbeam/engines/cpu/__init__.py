"""The engine for CPUs: compiled layers, for the families in families.py, that read weights in panels."""
