"""Linear algebra on tensors: operators, solvers, small quadratic programs. No losses and no data here."""
