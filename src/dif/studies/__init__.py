"""The paper's experiments, rerun; each uses the public API only."""
