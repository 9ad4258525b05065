"""Five answers to one question; each file stands alone."""
