"""Durable functions, tools, and the ledger of what happened outside (docs/design/006-effects.md)."""
