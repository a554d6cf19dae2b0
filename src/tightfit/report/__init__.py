"""The output of the commands: progress, tables, pictures and the files of a run."""
