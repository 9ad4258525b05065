"""Processes, memory, files, progress bars, checks of what users pass, errors in their code. No mathematics here."""
