"""The runtime: generation of tokens from an engine directory."""
