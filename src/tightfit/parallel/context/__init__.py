"""Context parallelism: each device has chunks of each sequence, and attention runs around a ring of
devices.
"""
