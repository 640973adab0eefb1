"""Every launch goes through here: replay without the launcher's checks, and programs that overlap."""
