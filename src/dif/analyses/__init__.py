"""Analyses built on estimators: sets to remove, prices of bounds, self-influence, and the verdict on predictions."""
