"""Questions that are made of estimators: sets to remove, prices of bounds, samples that look wrong."""
