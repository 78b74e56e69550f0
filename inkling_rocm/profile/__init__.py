"""Where the time of the engine's steps goes, op by op; see docs/profile.md."""
