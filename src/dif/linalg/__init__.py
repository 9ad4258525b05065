"""Linear algebra on tensors: operators, solvers, small quadratic programs. Nothing here knows losses or data."""
