"""Modules are searched for examples that run; those that need packages of an extra only where these are installed."""

from importlib.util import find_spec

PACKAGES = {
    "src/specbeam/apps/serve/*": ("fastapi", "uvicorn", "prometheus_client"),
    "src/specbeam/lab/evaluate/harness.py": ("lm_eval",),
    "src/specbeam/apps/ray/*": ("ray",),
}
collect_ignore_glob = [
    files for files, names in PACKAGES.items() if any(find_spec(name) is None for name in names)
]  # fmt: skip
