"""Memory that is taken once: scratch memory of steps, pinned memory of the host, weights that outlive a rank. And what
memory holds, bit by bit."""
