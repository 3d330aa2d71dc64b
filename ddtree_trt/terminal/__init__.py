"""Output of the commands on a terminal."""
