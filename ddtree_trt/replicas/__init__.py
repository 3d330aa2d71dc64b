"""Several engines behind one address, or over one file of requests, on one machine or many: by Ray."""
