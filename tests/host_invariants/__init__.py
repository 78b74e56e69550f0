"""The host contract as tests that any host can be run through: subclass `suite.HostInvariants`."""
