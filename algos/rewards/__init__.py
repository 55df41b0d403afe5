"""Rewards as pure functions of a completion: no processes, no actors, no files."""
