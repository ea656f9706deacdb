"""Common parts of kernels in Gluon: dependent launch, tiles of weights and tokens, rings of them, weights in fewer
bits, telling the L2 cache ahead."""
