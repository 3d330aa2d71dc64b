"""Engine directories to tokens."""
