"""Memory behind the latent cache of a rank, and the copies of pages to and fro."""
