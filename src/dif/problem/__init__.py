"""What a user states: samples, terms, constraints, perturbations. Nothing is evaluated here."""
