"""Where bytes live: the catalog, packs, locks and the witness. Knows nothing of what they mean."""
