"""What every process of a Ray of our own imports first (`early_imports`): in those for ranks, what ranks need."""

import os

if os.environ.get("LATENTSERVE_PROCESS") == "rank":
    from workers.rank.libraries import load_libraries

    load_libraries()
