"""Recipes, one for each method: the parts that it consists of, its output law, and its paper."""
