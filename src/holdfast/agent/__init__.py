"""Agents: their states, histories and branches in a store."""
