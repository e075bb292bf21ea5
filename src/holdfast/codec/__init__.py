"""Python values <-> bytes. No I/O: this room knows nothing of stores, agents or files."""
