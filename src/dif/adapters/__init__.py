"""Adapters to CVXPY, Cooper, scikit-learn, fairlearn and checkpoint files; they use the public names of dif only."""
