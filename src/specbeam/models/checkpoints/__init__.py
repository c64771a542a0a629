"""Reading of checkpoints that may be broken, foreign or hostile: folders, headers, configurations, weights."""
