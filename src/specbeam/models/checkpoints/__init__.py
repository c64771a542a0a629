"""Reading and checking of checkpoints that may be broken, foreign or hostile."""
