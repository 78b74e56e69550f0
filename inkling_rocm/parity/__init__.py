"""The same tiny models on several targets, compared op by op; see docs/parity.md."""
