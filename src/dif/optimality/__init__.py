"""One point (θ, λ): how well it satisfies the optimality conditions, and the system linearised there."""
