"""Parameters that are sharded over devices, and gathered while a block runs."""
