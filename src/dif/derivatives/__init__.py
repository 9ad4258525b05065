"""Values and derivatives of a problem at θ: the only room that calls autograd. It does not judge or move θ."""
