"""The processes of a replica: its scheduler's, the front's end of it, and how all are started without Ray."""
