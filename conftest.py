"""Modules are searched for examples that run; those of the server only where its packages are installed."""

from importlib.util import find_spec

HAS_SERVER = all(find_spec(name) is not None for name in ("fastapi", "uvicorn", "prometheus_client"))
collect_ignore_glob = [] if HAS_SERVER else ["src/specbeam/serve/*"]
