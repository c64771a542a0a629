"""A plug-in of vLLM's server, which answers `use_beam_search` by specbeam's loop on the server's engine."""
