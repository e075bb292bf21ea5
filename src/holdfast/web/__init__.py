"""The page: `holdfast ui` shows in a browser what agents did, and lets a person put it right.

It stands beside the command line and, as that, reads through the public API only. Everything that a store holds is
hostile text here. Needs the extra ``web``; nothing else in the package imports this room.
"""
