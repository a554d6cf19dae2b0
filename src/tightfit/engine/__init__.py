"""The engine: build a run, take its steps, save and resume it."""
