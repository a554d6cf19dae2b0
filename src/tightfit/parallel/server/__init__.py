"""A parameter server and its workers."""
