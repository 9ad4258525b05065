"""Solvers: `fit`, many problems at once, paths under a perturbation. Judging a point: `optimality`."""
