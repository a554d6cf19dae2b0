"""Pipeline parallelism: one rank's stages, its schedule, and its messages to other ranks."""
