"""The engine for GPUs: few kernels per layer, captured passes, and steps that launch them."""
