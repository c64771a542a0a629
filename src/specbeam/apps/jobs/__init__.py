"""Jobs of many prompts, from a file to a file: each id once, with the same text whenever the process was ended."""
