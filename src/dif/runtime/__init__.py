"""Processes, memory, disk, terminals and what users type: no mathematics."""
