"""The options of `generate`: their checks, their defaults, and the settings made from them."""
