"""Everything that the commands show or write: progress, tables, pictures and the files of a run."""
