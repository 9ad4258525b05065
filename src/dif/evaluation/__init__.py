"""Values and derivatives of a problem at θ: the only room that touches data or autograd."""
