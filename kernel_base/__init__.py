"""What the sibling packages share: architecture facts, tuning rows with evidence, the kernel
register."""
