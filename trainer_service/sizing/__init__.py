"""Chooses what the settings leave open, so that the training fits into the memory of the device."""
