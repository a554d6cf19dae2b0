"""The processes of a parameter server and its workers."""
