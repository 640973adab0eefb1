"""Every foreign function that a backend calls, one module a backend. A module holds `CALLS` and imports no library."""
