"""What else trains models larger than memory, and how the benches talk to it."""
