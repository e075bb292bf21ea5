"""One agent's history: checkpoint, restore, branch, diff, rollback."""
