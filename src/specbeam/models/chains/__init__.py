"""Targets that other programs run: vLLM, a server, llama.cpp. They score chains of tokens and return ranked rows."""
