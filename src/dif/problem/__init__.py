"""The statement of a problem: samples, terms, constraints, perturbations. Nothing is evaluated here."""
