"""A runtime on top of Triton: compiling ahead, launching again for the next layer, launching dependently."""
