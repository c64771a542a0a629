"""SEARCH: trees of reasoning steps above decoding, led by a value function of the user."""
