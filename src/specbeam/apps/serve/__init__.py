"""SERVE: one thread that decodes for many clients, and its HTTP server."""
