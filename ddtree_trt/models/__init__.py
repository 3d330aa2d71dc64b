"""Architectures, each stated once, as build and runtime share them."""
