"""Jobs of many prompts, from file to file: each row is answered once, with the same text however often a job is resumed."""
