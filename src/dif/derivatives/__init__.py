"""Values and derivatives at θ and of one training step, and checks of both: the only room that calls autograd."""
