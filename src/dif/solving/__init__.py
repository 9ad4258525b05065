"""Solvers: `fit`, Newton's method on many problems at once, and the path of a solution under a perturbation."""
