"""What users already have, read by dif: each adapter is an extra and uses the public API alone."""
