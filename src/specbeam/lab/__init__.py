"""The lab, for those who measure and train; it imports public names only."""
