"""The engine for GPUs: few kernels per layer of the families in families.py, captured passes, and steps to launch them."""
