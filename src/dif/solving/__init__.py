"""Solvers: `fit`, many problems at once, paths under a perturbation, training runs. Judging a point: `optimality`."""
