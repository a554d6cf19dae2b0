"""Translates the configuration file of another training tool into a tightfit job and plan.

`importing.py` imports a file. Each tool has a module of its own with a table of the keys that its
files may have. `mapping.py` defines the entries of these tables. `combine.py` sets the fields that
depend on several keys.
"""
