"""Answers to one question: what does a perturbation change? Each estimator stands alone."""
