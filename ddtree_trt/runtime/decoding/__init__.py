"""The decode loop, its methods and sampling."""
