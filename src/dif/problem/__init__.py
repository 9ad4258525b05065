"""Definition of a problem: samples, losses, terms, constraints, perturbations. Sums and derivatives: `evaluation`."""
