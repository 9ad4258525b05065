"""Training runs: their steps, states and weights, and the derivatives of a run through its steps."""
