"""Modules that are divided among devices by columns and rows."""
