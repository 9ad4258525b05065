"""Processes, memory, files, frames, progress bars, axes, checks of what users pass. No mathematics here."""
