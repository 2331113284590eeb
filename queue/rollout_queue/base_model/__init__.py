"""The model that trainer and engines begin with, as its directory has it: which files and tensors it has."""
