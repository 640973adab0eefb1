"""Things that a process has once: torch's state, graph pools, workspaces, memory, progress."""
