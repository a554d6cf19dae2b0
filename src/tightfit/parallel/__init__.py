"""What the methods that use several processes are made of: gradient buckets, sharding, pipelines,
rings and servers.
"""
