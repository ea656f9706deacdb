"""What every process of a Ray of our own imports first (`early_imports`): in those for ranks, what ranks need."""

import logging
import os

from deploy.cluster.spared_pandas import spare_pandas

spare_pandas()

if os.environ.get("LATENTSERVE_PROCESS") == "rank":
    try:
        from workers.rank.libraries import load_libraries

        load_libraries()
    except Exception:  # the rank that takes this process fails likewise, and says so
        logging.getLogger("latentserve.early_imports").exception("a process for ranks cannot import what these need")
