"""Adapters to CVXPY, Cooper, scikit-learn and checkpoint files. They use only the public names of dif, no rooms."""
