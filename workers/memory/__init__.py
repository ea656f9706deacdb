"""Memory that is taken once: scratch memory of steps, pinned memory of the host. And what memory holds, bit by bit."""
