"""Estimators of what a perturbation changes, their protocol and results. Uses of scores belong in `analyses`."""
