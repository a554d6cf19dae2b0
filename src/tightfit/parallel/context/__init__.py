"""Context parallelism: chunks of sequences, and attention around a ring of devices."""
