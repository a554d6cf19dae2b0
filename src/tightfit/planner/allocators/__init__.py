"""Simulate two allocators, torch's CUDA caching allocator and glibc's heap, to find how many bytes
they reserve for a training step."""
