"""Faults on purpose: carried out in the launcher of node 0, on command, by a seed, or as the run file says."""
