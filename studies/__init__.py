"""Studies that compare estimators with retraining: the paper's experiments and some more. No method begins here."""
