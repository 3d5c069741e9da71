"""Reading: open a dataset, look records up, view their tensors, verify."""
