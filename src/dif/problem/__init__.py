"""Definition of a problem: samples, losses, terms, constraints, perturbations. Sums and derivatives: `derivatives`."""
