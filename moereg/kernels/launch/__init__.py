"""What every launch goes through: replay without the launcher's checks, and programs that overlap."""
