"""What a built engine is on disk, as build and runtime share it."""
