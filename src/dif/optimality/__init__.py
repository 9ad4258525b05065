"""One point (θ, λ): its residuals, active set, certificate and linearised KKT system. It is not moved here."""
