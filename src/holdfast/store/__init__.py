"""Bytes in tables and packs: immutable objects, the refs that name them, and two append-only lists."""
