"""What kernels in Gluon share: dependent launch, tiles of weights and tokens, rings of them, weights in fewer bits."""
