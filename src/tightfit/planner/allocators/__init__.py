"""Simulate CUDA's caching allocator and glibc's heap: the bytes that they reserve for a step."""
