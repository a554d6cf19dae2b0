"""The sections of a job, a module for each. `tightfit.job` has the job itself."""
