"""SEARCH: trees of reasoning steps, guided by a value function of the user."""
