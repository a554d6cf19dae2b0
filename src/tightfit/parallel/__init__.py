"""The parts of the methods that use several processes: gradient buckets, sharding, pipelines, rings
and parameter servers.
"""
