"""Linear algebra on tensors: operators, solvers, small quadratic programs. It knows no losses and no data."""
