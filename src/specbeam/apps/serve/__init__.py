"""SERVE: one thread that decodes for many clients, and the HTTP server in front of it."""
