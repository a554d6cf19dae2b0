"""Measurements of a machine: the rates at which it runs operations, from which step times are predicted."""
