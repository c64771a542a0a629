"""Random calls of every kind on tiny random models, and the invariants that each answer must satisfy."""
