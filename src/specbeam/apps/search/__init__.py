"""SEARCH: trees of reasoning steps, guided by the user's value function."""
