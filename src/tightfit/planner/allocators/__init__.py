"""What CUDA's caching allocator and glibc's heap reserve for a step."""
