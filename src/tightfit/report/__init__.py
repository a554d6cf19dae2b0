"""What people look at: progress, tables, the files of a run."""
