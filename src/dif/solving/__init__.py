"""How points are reached: fit, many problems at once, a solution followed along a path."""
