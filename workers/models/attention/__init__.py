"""Multi-head latent attention: `latent` has a layer's weights and its token-wise sides; what lies between them is done
by backends (`backend`), one for each way in which rows attend."""
