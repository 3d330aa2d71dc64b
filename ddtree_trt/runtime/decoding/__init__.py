"""The decode loop, its methods, tree policies and sampling."""
