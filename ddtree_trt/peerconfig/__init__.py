"""Configuration of other inference engines for the pair of an engine directory, by the names of a release of each."""
