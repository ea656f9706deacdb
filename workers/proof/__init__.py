"""The self-test: before a replica serves, every captured graph is proven against eager.

`decode_steps` proves decode steps, `segments` mixed steps, both on a `scene`: random `rows` in slots and cache, drawn
from one rank's `ground`, with poison around them. `endings` proves where mixed steps end, `prove` a whole replica. How
the entries of a cache are filled, poisoned and compared is the cache's own affair (`workers.cache`)."""
