"""Reads the configuration of another tool and says it in tightfit's words: a job and a plan.

`importing.py` does it. Each tool is one module with one table of its keys; `mapping.py` has what
the tables are made of, `combine.py` joins what several keys say together.
"""
