"""Values and derivatives at θ and of one training step, and checks of both. Only adapters call autograd besides."""
