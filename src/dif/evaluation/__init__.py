"""Values and derivatives of a problem at θ: the only package that evaluates losses on data or calls autograd."""
