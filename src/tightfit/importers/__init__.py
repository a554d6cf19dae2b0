"""Translates the configuration of another tool into a job and a plan.

`importing.py` imports a file. Each tool has one module with one table of its keys. `mapping.py`
defines the entries of these tables. `combine.py` sets the fields that depend on several keys.
"""
