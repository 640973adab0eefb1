"""Process-wide state: torch's settings, graph pools, workspaces, memory, progress."""
