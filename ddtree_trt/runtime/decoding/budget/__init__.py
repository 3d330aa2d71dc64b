"""How many draft nodes a round verifies: fixed, or automatic by what rounds cost on this machine and what they gain."""
