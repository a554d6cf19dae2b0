"""The sections of a job, such as model, data and train, with a module for each. The job itself is
in `tightfit.job`."""
