"""Processes, memory, files, progress bars and the checking of user input; no mathematics."""
