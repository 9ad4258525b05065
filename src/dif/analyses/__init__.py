"""Analyses that use estimators: sets to remove, prices of bounds, self-influence, verdicts. No new estimators here."""
