"""The self-test: before a replica serves, every captured graph is proven against eager.

`decode_steps` proves decode steps, `segments` mixed steps, both on a `fixture`: random `rows` in slots and cache, drawn
from one rank's `fixture_pool`, with poison around them. `tails` proves where mixed steps end, `prove` a whole replica.
How the entries of a cache are filled, poisoned and compared is the cache's own affair (`workers.cache`)."""
